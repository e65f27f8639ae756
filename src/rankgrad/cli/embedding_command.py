"""`rankgrad eval --embeddings`: embeddings from elsewhere, evaluated like the test split of a run."""

import argparse
import shlex
from pathlib import Path

from rankgrad._messages import printable
from rankgrad.cli.parser import Parser, device_named
from rankgrad.cli.show_commands import next_steps
from rankgrad.runs.embedding_files import evaluate_files, read_embeddings, save_evaluation
from rankgrad.runs.results_table import comparison


def add_embedding_files(parser: Parser) -> None:
    """The flags of `evaluate_embeddings`."""
    group = parser.add_argument_group("embeddings from elsewhere, in place of RUN")
    group.add_argument(
        "--embeddings", metavar="FILE", type=Path, help=".npy, .safetensors or .parquet [N, d], or a folder of `rankgrad embed`"
    )
    group.add_argument(
        "--labels",
        metavar="FILE",
        type=Path,
        help=".csv with a column label (also path, category, is_query, is_gallery), .npy or .parquet [those in --embeddings]",
    )
    group.add_argument("--gallery", metavar="FILE", type=Path, help="rank --embeddings against these, and not each other")
    group.add_argument("--gallery-labels", metavar="FILE", type=Path, help="labels of --gallery")
    group.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare by cosine; --no-normalize: by dot product",
    )
    group.add_argument("--out", metavar="DIR", type=Path, help="folder of the result [runs/eval-NAME]")


def evaluate_embeddings(parser: Parser, given: argparse.Namespace) -> int:
    """`rankgrad eval --embeddings X.npy --labels Y.csv`."""
    if given.run is not None or given.embeddings is None:
        parser.error("name the folder of a run, or embeddings with --embeddings, and not both")
    out = given.out or Path("runs") / f"eval-{given.embeddings.resolve().stem}"
    if out.exists():
        parser.error(f"{out} already exists: choose another folder with --out")
    image_root = Path(given.image_root).expanduser() if "image_root" in given else None
    queries = read_embeddings(given.embeddings, given.labels, image_root)
    gallery = None if given.gallery is None else read_embeddings(given.gallery, given.gallery_labels, image_root)
    device = device_named(given.device)
    found = evaluate_files(queries, gallery, protocol=given.protocol, normalize=given.normalize, device=device)
    save_evaluation(found, out, given.embeddings.resolve())
    assert found.result is not None, "one process has the result"
    print(f"{printable(found.result.coverage)}\n\n{comparison({found.split: found}, ())}")
    report = (f"rankgrad report {shlex.quote(str(out))}", "retrieved items, confusions and a map, as one page")
    print(f"\n{next_steps([report])}")
    return 0
