"""A page as a tree, by a parser that forgives nothing."""

from dataclasses import dataclass, field
from html.parser import HTMLParser

# elements of HTML without an end
VOID = frozenset({"meta", "img", "br"})


@dataclass
class Node:
    """An element of a parsed page."""

    tag: str
    attributes: dict[str, str | None]
    parent: "Node | None" = None
    children: list["Node | str"] = field(default_factory=list)

    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text() for child in self.children)

    def all(self, tag: str, class_: str | None = None) -> list["Node"]:
        found = []
        for child in self.children:
            if isinstance(child, Node):
                classes = (child.attributes.get("class") or "").split()
                if child.tag == tag and (class_ is None or class_ in classes):
                    found.append(child)
                found += child.all(tag, class_)
        return found

    def one(self, tag: str, **attributes: str) -> "Node":
        (found,) = [
            node for node in self.all(tag) if all(node.attributes.get(name) == value for name, value in attributes.items())
        ]
        return found


class Strict(HTMLParser):
    """Builds nodes; an end without its beginning, or the other way round, is an error."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = self.at = Node("", {})

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute twice in {tag}: {attrs}"
        node = Node(tag, dict(attrs), self.at)
        self.at.children.append(node)
        if tag not in VOID:
            self.at = node

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.at.children.append(Node(tag, dict(attrs), self.at))

    def handle_endtag(self, tag: str) -> None:
        assert tag == self.at.tag, f"</{tag}> inside <{self.at.tag}>"
        assert self.at.parent is not None
        self.at = self.at.parent

    def handle_data(self, data: str) -> None:
        self.at.children.append(data)


def parsed(html: str) -> Node:
    parser = Strict()
    parser.feed(html)
    parser.close()
    assert parser.at is parser.root, f"<{parser.at.tag}> is not closed"
    return parser.root


def rows_of(table: Node) -> list[list[str]]:
    """The cells of a table, its header first."""
    cells = [[child for child in row.children if isinstance(child, Node)] for row in table.all("tr")]
    return [[cell.text().strip() for cell in row] for row in cells]
