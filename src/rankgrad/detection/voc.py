"""Pascal VOC, and any data set in its layout.

    VOCdevkit/VOC2007/JPEGImages/000001.jpg
                      Annotations/000001.xml
                      ImageSets/Main/trainval.txt, test.txt

Annotations count pixels from 1 and name the first and the last pixel of a box. Here pixel i spans i to i + 1, so a box
extends from xmin - 1 to xmax. Widths and overlaps equal those of the development kit, which adds 1 to every difference.
"""

import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rankgrad._messages import did_you_mean
from rankgrad.detection.scenes import Pixels, Scene, Scenes, concatenate

VOC_CLASSES = (
    "aeroplane",
    "bicycle",
    "bird",
    "boat",
    "bottle",
    "bus",
    "car",
    "cat",
    "chair",
    "cow",
    "diningtable",
    "dog",
    "horse",
    "motorbike",
    "person",
    "pottedplant",
    "sheep",
    "sofa",
    "train",
    "tvmonitor",
)
LAYOUT = "a folder with JPEGImages, Annotations and ImageSets/Main, like VOCdevkit/VOC2007"
# names that a message lists
LISTED = 5


@dataclass(frozen=True)
class _Object:
    name: str
    box: tuple[float, float, float, float]
    difficult: bool


def read_voc(
    root: Path | str,
    split: str,
    *,
    years: Sequence[str] = (),
    class_names: Sequence[str] | None = None,
    skip_bad: bool = False,
) -> Scenes:
    """The images of a split with their boxes.

    Args:
        root: VOCdevkit, its parent, or one folder in its layout.
        split: name of a list in ImageSets/Main, such as "trainval".
        years: "2007", "2012" or both, of a VOCdevkit; empty: `root` is one folder in the layout, or contains one.
        class_names: names of the labels 1, 2, ...; by default the 20 classes of VOC if years are given, else all names in the
            annotations, sorted.
        skip_bad: skip objects that have no area or lie outside of their image, with a note, instead of stopping.

    Boxes are clipped to their image. Images without objects are kept: they are all background.
    """
    root = Path(root)
    if not root.is_dir():
        raise FileNotFoundError(f"voc: {root} is not a folder; expected {LAYOUT}")
    if years:
        folders = [_folder_of_year(root, year) for year in years]
        names = tuple(class_names or VOC_CLASSES)
    else:
        folders = [_folder(root)]
        names = tuple(class_names or _names_in(folders[0]))
    parts = [_read(folder, split, names, skip_bad=skip_bad) for folder in folders]
    return parts[0] if len(parts) == 1 else concatenate(f"voc/{split}", parts)


def lists_in(root: Path | str) -> list[str]:
    """Names of the splits in a folder of this layout."""
    folder = _folder(Path(root)) / "ImageSets" / "Main"
    return sorted(path.stem for path in folder.glob("*.txt"))


def _folder_of_year(root: Path, year: str) -> Path:
    places = [root / f"VOC{year}", root / "VOCdevkit" / f"VOC{year}", root]
    for place in places:
        if (place / "Annotations").is_dir() and (place != root or root.name == f"VOC{year}"):
            return place
    raise FileNotFoundError(f"voc: VOC{year}/Annotations is missing in {root} and in {root / 'VOCdevkit'}; expected {LAYOUT}")


def _folder(root: Path) -> Path:
    if (root / "Annotations").is_dir():
        return root
    below = sorted(path.parent for path in root.glob("*/Annotations") if path.is_dir())
    if not below:
        raise FileNotFoundError(f"voc: Annotations is missing in {root} and in the folders below it; expected {LAYOUT}")
    if len(below) > 1:
        raise ValueError(f"voc: several folders in {root} have annotations ({', '.join(p.name for p in below)}): name one")
    return below[0]


def _names_in(folder: Path) -> tuple[str, ...]:
    names = {found.name for path in sorted((folder / "Annotations").glob("*.xml")) for found in _objects(path, _parsed(path))}
    if not names:
        raise ValueError(f"voc: no annotation in {folder / 'Annotations'} has an object")
    return tuple(sorted(names))


def _read(folder: Path, split: str, class_names: tuple[str, ...], *, skip_bad: bool) -> Scenes:
    scenes, files, notes = [], [], _Notes()
    for stem in _listed(folder, split):
        image = _image_file(folder, stem)
        scenes.append(_scene(folder / "Annotations" / f"{stem}.xml", image, class_names, notes, skip_bad=skip_bad))
        files.append(image)
    present = {int(label) for scene in scenes for label in scene.labels}
    never = [name for label, name in enumerate(class_names, start=1) if label not in present]
    if never:
        notes.add(f"no object of {', '.join(never)} in {split}", "")
    return Scenes(
        f"{folder.name}/{split}", class_names, tuple(scenes), lambda number: _pixels(files[number]), notes.sentences()
    )


class _Notes:
    """Findings, each with the first files that have it."""

    def __init__(self) -> None:
        self._files: dict[str, list[str]] = {}

    def add(self, what: str, file: str) -> None:
        self._files.setdefault(what, []).append(file)

    def sentences(self) -> tuple[str, ...]:
        return tuple(self._sentence(what, files) for what, files in self._files.items())

    def _sentence(self, what: str, files: list[str]) -> str:
        if not any(files):
            return what
        more = ", ..." if len(files) > LISTED else ""
        return f"{len(files):,} {what} ({', '.join(files[:LISTED])}{more})"


def _listed(folder: Path, split: str) -> list[str]:
    path = folder / "ImageSets" / "Main" / f"{split}.txt"
    if not path.is_file():
        known = sorted(other.stem for other in path.parent.glob("*.txt"))
        there = f"; there is {', '.join(known[:8])}" if known else f"; expected {LAYOUT}"
        raise FileNotFoundError(f"voc: the list {path} is missing{there}")
    # the lists of a class have a second column
    stems = [line.split()[0] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not stems:
        raise ValueError(f"voc: {path} lists no image")
    twice = sorted({stem for stem in stems if stems.count(stem) > 1}) if len(set(stems)) < len(stems) else []
    if twice:
        raise ValueError(f"voc: {path} lists {', '.join(twice[:LISTED])} more than once")
    return stems


def _image_file(folder: Path, stem: str) -> Path:
    for suffix in (".jpg", ".jpeg", ".JPG", ".png"):
        path = folder / "JPEGImages" / f"{stem}{suffix}"
        if path.is_file():
            return path
    raise FileNotFoundError(f"voc: the image {folder / 'JPEGImages' / stem}.jpg is missing")


def _scene(path: Path, image: Path, class_names: tuple[str, ...], notes: _Notes, *, skip_bad: bool) -> Scene:
    if not path.is_file():
        raise FileNotFoundError(f"voc: the annotation {path} is missing")
    tree = _parsed(path)
    width, height = _size(tree, path, image)
    boxes, labels, difficult = [], [], []
    found = list(_objects(path, tree))
    if not found:
        notes.add("images without an object", path.name)
    for each in found:
        if each.name not in class_names:
            hint = did_you_mean(each.name, class_names)
            raise ValueError(f"voc: {path} has an object of the unknown class {each.name!r}: {hint}")
        x1, y1, x2, y2 = each.box
        shown = f"{x1:g}, {y1:g}, {x2:g}, {y2:g}"
        problem = ""
        if x2 <= x1 or y2 <= y1:
            problem = f"has no area ({shown})"
        elif x1 > width or y1 > height or x2 < 1 or y2 < 1:
            problem = f"lies outside of its {width} x {height} pixels ({shown})"
        if problem and not skip_bad:
            raise ValueError(
                f"voc: {path}: the box of a {each.name} {problem}: correct the file, or skip such objects with `skip_bad=True`"
            )
        if problem:
            notes.add("objects skipped that have no area or lie outside of their image", path.name)
            continue
        if x1 < 1 or y1 < 1 or x2 > width or y2 > height:
            notes.add("boxes clipped to their image", path.name)
        boxes.append((max(x1 - 1, 0), max(y1 - 1, 0), min(x2, width), min(y2, height)))
        labels.append(class_names.index(each.name) + 1)
        difficult.append(each.difficult)
    return Scene(
        name=image.name,
        width=width,
        height=height,
        boxes=np.array(boxes, np.float32).reshape(-1, 4),
        labels=np.array(labels, np.int64),
        difficult=np.array(difficult, np.bool_),
    )


def _parsed(path: Path) -> ET.Element:
    try:
        return ET.parse(path).getroot()
    except ET.ParseError as error:
        reason = "is empty" if not path.read_bytes().strip() else f"is not XML ({error})"
        raise ValueError(f"voc: the annotation {path} {reason}") from error


def _objects(path: Path, tree: ET.Element) -> Iterator[_Object]:
    for entry in tree.iter("object"):
        name = (entry.findtext("name") or "").strip()
        if not name:
            raise ValueError(f"voc: {path} has an object without a name")
        # parts of a person have boxes of their own, inside a <part>
        frame = entry.find("bndbox")
        sides = [None if frame is None else frame.findtext(side) for side in ("xmin", "ymin", "xmax", "ymax")]
        try:
            x1, y1, x2, y2 = (float(side or "") for side in sides)
        except ValueError:
            told = ", ".join(str(side) for side in sides)
            raise ValueError(f"voc: {path}: the box of a {name} must be xmin, ymin, xmax, ymax, got {told}") from None
        if not np.isfinite((x1, y1, x2, y2)).all():
            raise ValueError(f"voc: {path}: the box of a {name} must be finite, got {x1}, {y1}, {x2}, {y2}")
        yield _Object(name, (x1, y1, x2, y2), (entry.findtext("difficult") or "0").strip() not in ("0", ""))


def _size(tree: ET.Element, path: Path, image: Path) -> tuple[int, int]:
    """As annotated, or that of the image: some tools write 0 or nothing."""
    told = [(tree.findtext(f"size/{side}") or "0").strip() for side in ("width", "height")]
    if not all(side.isdigit() for side in told):
        raise ValueError(f"voc: {path}: width and height must be whole numbers, got {' and '.join(told)}")
    width, height = map(int, told)
    if width and height:
        return width, height
    pixels = _pixels(image)
    return pixels.shape[1], pixels.shape[0]


def _pixels(path: Path) -> Pixels:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB"))
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        reason = "it is not an image" if isinstance(error, UnidentifiedImageError) else str(error)
        raise ValueError(f"voc: the image {path} cannot be read: {reason}") from error
