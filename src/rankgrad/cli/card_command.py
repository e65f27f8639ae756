"""`rankgrad card`: the model card of a run, and a folder with the model that others can use."""

import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rankgrad._messages import printable
from rankgrad.cli.parser import Parser
from rankgrad.models.trunks import describe_first_weights
from rankgrad.recipes.catalogue import RECIPES
from rankgrad.report.model_card import TEXTS, CardFacts, model_card
from rankgrad.report.run_reader import read_runs
from rankgrad.runs.recipe import Recipe, flag_of, format_value, settings_of
from rankgrad.search import text_export
from rankgrad.search.export import FILES, description
from rankgrad.search.sharing import PURPOSES, can_write_onnx, share
from rankgrad.search.text_export import export_sentence_encoder
from rankgrad.search.trained_model import TrainedModel, load


def main(arguments: Sequence[str]) -> int:
    """`rankgrad card RUN --out DIR`."""
    parser = Parser(
        "rankgrad card",
        "Print the model card of a run in Markdown, or write a folder to share: card, weights, preprocessing and ONNX; for "
        "texts card, weights and tokenizer as sentence-transformers reads them.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="write a new folder, which rankgrad.load opens, or SentenceTransformer for texts [print the card]",
    )
    parser.add_argument("--name", metavar="NAME", help="name of the model [that of --out, or of RUN]")
    parser.add_argument(
        "--license",
        metavar="ID",
        default="",
        help="licence of the weights, as the Hugging Face Hub names it, such as apache-2.0",
    )
    parser.add_argument("--no-onnx", dest="onnx", action="store_false", help="leave out model.onnx")
    parser.add_argument("--checkpoint", choices=("best", "last"), help="which weights [best where there is one, else last]")
    given = parser.parse(arguments)
    model = load(given.run, "cpu", checkpoint=given.checkpoint)
    of_texts = model.tokenizer is not None
    onnx = given.onnx and given.out is not None and not of_texts
    if onnx and not can_write_onnx():
        print("note: model.onnx is left out: it needs the search extra, pip install 'rankgrad[search]'", file=sys.stderr)
        onnx = False
    name = given.name or (given.out or given.run).resolve().name
    (run,) = read_runs([given.run])
    text = model_card(run, _facts(model, name, given.license, onnx=onnx or given.out is None))
    if given.out is None:
        print("\n".join(map(printable, text.rstrip("\n").split("\n"))))
        return 0
    if of_texts:
        export_sentence_encoder(model, given.out, text)
    else:
        share(model, given.out, text, onnx=onnx)
    size = sum(path.stat().st_size for path in given.out.rglob("*") if path.is_file())
    print(f"Wrote the model, its card and what others need to use it to {given.out} ({size / 1e6:.1f} MB)")
    if not given.license:
        print("The card states no licence: name that of the weights with --license")
    return 0


def _facts(model: TrainedModel, name: str, licence: str, *, onnx: bool) -> CardFacts:
    recipe = model.recipe
    common = partial(
        CardFacts,
        name=name,
        checkpoint=model.checkpoint,
        step=model.step,
        dim=model.dim,
        parameters=sum(parameter.numel() for parameter in model.model.parameters()),
        command=training_command(recipe),
        licence=licence,
    )
    if model.tokenizer is None:
        return common(
            preparation=description(model)["preparation"],
            first_weights=describe_first_weights(recipe.trunk, recipe.weights),
            files={file: purpose for file, purpose in PURPOSES.items() if onnx or file != FILES["onnx"]},
        )
    return common(
        preparation=[f"tokenize, and cut after {model.tokenizer.max_length:,} tokens"],
        first_weights=f"Training began with the weights of {Path(recipe.trunk).name}."
        if recipe.weights == "default"
        else describe_first_weights("", recipe.weights),
        files=text_export.PURPOSES,
        modality=TEXTS,
    )


def training_command(recipe: Recipe) -> str:
    """The command that trains a recipe, with a flag for each setting in which it differs from the one of its name."""
    base = RECIPES.get(recipe.name)
    known = settings_of(type(recipe))
    differing = recipe.differences(base) if isinstance(base, type(recipe)) else dict.fromkeys(known)
    flags = []
    for name in differing:
        value = getattr(recipe, name)
        if isinstance(value, bool):
            flags.append(flag_of(name if value else f"no_{name}"))
        elif value not in ("", ()):
            shown = Path(value).name if isinstance(value, str) and Path(value).is_absolute() else format_value(value)
            flags.append(f"{flag_of(name)} {shlex.quote(shown)}")
    return " ".join(["rankgrad train", *([recipe.name] if base is not None else []), "--data DIR", *flags])
