"""The commands around a trained run: embed, index, search, predict, export, serve."""

import argparse
import csv
import io
import ipaddress
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rankgrad._files import replace_file
from rankgrad._messages import plural, printable, table
from rankgrad.cli.parser import Parser, device_named
from rankgrad.search.trained_model import TrainedModel, load

if TYPE_CHECKING:
    from rankgrad.search.gallery import Gallery
    from rankgrad.search.searcher import Searcher

LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")


def main_embed(arguments: Sequence[str]) -> int:
    """`rankgrad embed RUN IMAGES --out DIR`."""
    from rankgrad.search.gallery_writer import embed_images
    from rankgrad.search.image_lists import ImageList, images_at, manifest_of_images, split_of_data_set, texts_of_file

    parser = Parser("rankgrad embed", "Embed images or texts with a trained run: write embeddings.npy and a list of them.")
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run, or of a shared model")
    parser.add_argument(
        "images",
        metavar="IMAGES",
        type=Path,
        nargs="?",
        help="a folder, with its subfolders, an image, or a CSV file with a column path; a file of texts for a text run",
    )
    parser.add_argument("--data", metavar="NAME:DIR", help="a data set in place of IMAGES, such as sop:DIR")
    parser.add_argument("--split", metavar="NAME", default="test", help="split of the data set [test]")
    parser.add_argument("--partial", action="store_true", help="accept an incomplete copy of the data set")
    parser.add_argument("--image-root", metavar="DIR", type=Path, help="folder of the images that a CSV file lists")
    parser.add_argument("--text-column", metavar="NAME", help="column of the texts [that of the run]")
    parser.add_argument("--label-column", metavar="NAME", help="column of their labels [that of the run]")
    parser.add_argument("--out", metavar="DIR", type=Path, help="a new folder [RUN/embeddings/NAME of the images]")
    parser.add_argument("--ids", choices=("parquet", "csv"), default="parquet", help="format of the list of images [parquet]")
    parser.add_argument("--skip-bad", action="store_true", help="list images that cannot be read and skip them")
    parser.add_argument("--workers", metavar="N", type=int, help="threads that decode images [one per core]")
    _add_model(parser)
    given = parser.parse(arguments)
    if (given.images is None) == (given.data is None):
        parser.error("name the images: a folder, an image or a CSV file, or a data set with --data, and not both")
    if given.workers is not None and given.workers < 1:
        parser.error(f"--workers must be at least 1, got {given.workers}")
    model = _load(given.run, given)
    images: ImageList
    if given.data is not None:
        seed = model.recipe.split_seed
        images, notes = split_of_data_set(
            given.data,
            given.split,
            partial=given.partial,
            split_seed=None if seed == "alphabetical" else seed,
            image_root=given.image_root,
            columns=model.recipe.columns,
        )
        for note in notes:
            print(f"note: {note}", flush=True)
    elif model.tokenizer is not None:
        names = {"text": given.text_column, "label": given.label_column}
        columns = replace(model.recipe.columns, **{kind: name for kind, name in names.items() if name})
        images = texts_of_file(given.images, columns)
    elif given.images.suffix.lower() == ".csv":
        images = manifest_of_images(given.images, given.image_root)
    else:
        images = images_at([given.images])
    out = given.out or given.run / "embeddings" / images.table.name.replace("/", "-")
    gallery = embed_images(model, images, out, ids=given.ids, skip_bad=given.skip_bad, workers=given.workers)
    print(f"Wrote {plural(len(gallery), 'embedding')} of {gallery.embeddings.shape[1]} dimensions to {out}")
    return 0


def main_index(arguments: Sequence[str]) -> int:
    """`rankgrad index EMBEDDINGS`."""
    from rankgrad.search.gallery import Gallery
    from rankgrad.search.index import KINDS, build_index

    parser = Parser("rankgrad index", "Index embeddings for fast search, and measure the index against exact search.")
    parser.add_argument("embeddings", metavar="EMBEDDINGS", type=Path, help="folder that `rankgrad embed` wrote")
    parser.add_argument(
        "--kind", choices=("auto", *KINDS), default="auto", help="kind of index [auto: by the number of images]"
    )
    parser.add_argument(
        "--recall", metavar="R", type=float, default=0.95, help="share of the nearest neighbours to find [0.95]"
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help="where to write [EMBEDDINGS]")
    given = parser.parse(arguments)
    if not 0 < given.recall <= 1:
        parser.error(f"--recall must lie in (0, 1], got {given.recall:g}")
    gallery = Gallery.open(given.embeddings)
    out = given.out or given.embeddings
    report = build_index(gallery, out, kind=given.kind, recall=given.recall)
    print(f"{report.kind}: {report.why}\n\n{report.table()}\n")
    noun = gallery.images.table.noun
    print(
        f"{report.queries:,} {noun}s of the gallery as queries, each excluded from its own results; one at a time, one thread"
    )
    print(f"Wrote the index to {out}")
    return 0


def main_search(arguments: Sequence[str]) -> int:
    """`rankgrad search IMAGE --index DIR`."""
    from rankgrad.search.image_lists import images_at
    from rankgrad.search.searcher import Searcher

    parser = Parser("rankgrad search", "Find the images of a gallery that are nearest to an image, or to each of several.")
    parser.add_argument(
        "images", metavar="IMAGE", nargs="+", help="images to search with, or folders of them; for a gallery of texts, texts"
    )
    parser.add_argument("--index", metavar="DIR", type=Path, required=True, help="folder of the index, or of embeddings alone")
    parser.add_argument("--run", metavar="RUN", type=Path, help="folder of the run [the one that made the embeddings]")
    parser.add_argument("-k", metavar="N", type=int, default=10, help="number of results [10]")
    parser.add_argument("--exact", action="store_true", help="compare with every image, without the index")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the results to a CSV file [print them]")
    _add_model(parser)
    given = parser.parse(arguments)
    if given.k < 1:
        parser.error(f"-k must be at least 1, got {given.k}")
    searcher = Searcher.open(given.index, exact=given.exact)
    of_texts = searcher.gallery.images.table.texts is not None
    images = None if of_texts else images_at([Path(place) for place in given.images]).table
    model = _load_for(searcher.gallery, given)
    files = list(given.images) if images is None else [images.file(row) for row in range(len(images))]
    rows = [
        [str(query), str(rank), f"{hit.score:.4f}", hit.label or "-", hit.text or str(hit.path)]
        for query, hits in zip(files, model.search(files, searcher, given.k), strict=True)
        for rank, hit in enumerate(hits, 1)
    ]
    header = ["query", "rank", "score", "label", "text" if of_texts else "path"]
    if given.out is not None:
        _write_csv(given.out, header, rows)
        print(f"Wrote {plural(len(rows), 'result')} of {plural(len(files), 'query', 'queries')} to {given.out}")
        return 0
    first = 1 if len(files) == 1 else 0
    print(table(header[first:], [row[first:] for row in rows], align="lrrll"[first:]))
    return 0


def main_predict(arguments: Sequence[str]) -> int:
    """`rankgrad predict RUN IMAGES --gallery EMB`."""
    from rankgrad.search.image_lists import images_at
    from rankgrad.search.prediction import predict_labels
    from rankgrad.search.searcher import Searcher

    parser = Parser("rankgrad predict", "Label images or texts by their nearest neighbours in a gallery, as CSV.")
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run, or of a shared model")
    parser.add_argument(
        "images", metavar="IMAGES", type=Path, nargs="+", help="images, or folders of them; texts, or files of them"
    )
    parser.add_argument(
        "--gallery", metavar="EMB", type=Path, required=True, help="folder of embedded images with labels, or of their index"
    )
    parser.add_argument("-k", metavar="N", type=int, default=10, help="number of neighbours that vote [10]")
    parser.add_argument("--exact", action="store_true", help="compare with every image, without the index")
    parser.add_argument("--out", metavar="FILE", type=Path, help="where to write the CSV [print it]")
    parser.add_argument("--workers", metavar="N", type=int, help="threads that decode images [one per core]")
    _add_model(parser)
    given = parser.parse(arguments)
    for name, value in (("-k", given.k), ("--workers", given.workers)):
        if value is not None and value < 1:
            parser.error(f"{name} must be at least 1, got {value}")
    searcher = Searcher.open(given.gallery, exact=given.exact)
    gallery = searcher.gallery
    model = _load_for(gallery, given)
    gallery.check_fits(model)
    if model.tokenizer is not None:
        return _predict_texts(model, searcher, given)
    images = images_at(given.images).table
    files = [images.file(row).absolute() for row in range(len(images))]
    root = gallery.images.table.root.absolute()
    rows = {path: row for row, path in enumerate(gallery.images.table.paths)}
    itself = [rows.get(path.relative_to(root).as_posix(), -1) if path.is_relative_to(root) else -1 for path in files]
    predictions = predict_labels(searcher, model.embed(files, workers=given.workers), given.k, exclude=itself)
    content = [
        [str(path), each.label, f"{each.agreement:.3f}", f"{each.score:.4f}", str(gallery.images.table.file(each.nearest))]
        for path, each in zip(files, predictions, strict=True)
    ]
    _give_labels(given.out, ["path", "label", "agreement", "score", "nearest"], content, "image")
    return 0


def _predict_texts(model: TrainedModel, searcher: "Searcher", given: argparse.Namespace) -> int:
    """Labels of the texts of a file, those of the gallery itself without their own vote."""
    from rankgrad.data.readers.records import FILE_TYPES
    from rankgrad.search.image_lists import texts_of_file
    from rankgrad.search.prediction import predict_labels

    texts: list[str] = []
    for place in given.images:
        is_file = place.exists() or place.suffix in FILE_TYPES
        texts += (texts_of_file(place, model.recipe.columns).table.texts or ()) if is_file else (str(place),)
    known = searcher.gallery.images.table.texts or ()
    rows = {text: row for row, text in enumerate(known)}
    predictions = predict_labels(searcher, model.embed_texts(texts), given.k, exclude=[rows.get(text, -1) for text in texts])
    content = [
        [text, each.label, f"{each.agreement:.3f}", f"{each.score:.4f}", known[each.nearest]]
        for text, each in zip(texts, predictions, strict=True)
    ]
    _give_labels(given.out, ["text", "label", "agreement", "score", "nearest"], content, "text")
    return 0


def _give_labels(out: Path | None, header: list[str], content: list[list[str]], noun: str) -> None:
    if out is None:
        csv.writer(sys.stdout, lineterminator="\n").writerows([header, *([printable(cell) for cell in row] for row in content)])
    else:
        _write_csv(out, header, content)
        print(f"Wrote the labels of {plural(len(content), noun)} to {out}")


def _write_csv(path: Path, header: list[str], rows: list[list[str]]) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    replace_file(path, text.getvalue())


def main_export(arguments: Sequence[str]) -> int:
    """`rankgrad export RUN --format onnx`."""
    from rankgrad.search.export import FILES, export_model
    from rankgrad.search.text_export import FORMAT, export_sentence_encoder

    parser = Parser("rankgrad export", "Write the model of a run for use elsewhere, and check what was written.")
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run, or of a shared model")
    parser.add_argument(
        "--format",
        choices=(*FILES, FORMAT),
        action="append",
        help=f"file format; may be repeated [safetensors; for a run on texts {FORMAT}]",
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help="where to write [RUN/export]")
    _add_model(parser, device=False)
    given = parser.parse(arguments)
    model = _load(given.run, given)
    if model.tokenizer is not None or FORMAT in (given.format or ()):
        if set(given.format or (FORMAT,)) != {FORMAT}:
            raise ValueError(f"--format: a run on texts is written as {FORMAT}, and only such a run")
        out = given.out or given.run / "export" / FORMAT
        error = export_sentence_encoder(model, out)
        print(f"{out}: embeddings within {error:.1e} of the model's" if error == error else f"{out}: not compared")
        return 0
    for kind in given.format or ("safetensors",):
        exported = export_model(model, kind, given.out or given.run / "export")
        size = exported.path.stat().st_size / 1e6
        print(f"{exported.path}: {size:.1f} MB, embeddings within {exported.max_error:.1e} of the model's", flush=True)
    return 0


def main_serve(arguments: Sequence[str]) -> int:
    """`rankgrad serve RUN --index DIR`."""
    parser = Parser("rankgrad serve", "Serve a page to search with images in the browser.")
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run, or of a shared model")
    parser.add_argument("--index", metavar="DIR", type=Path, required=True, help="folder of the index, or of embeddings alone")
    parser.add_argument(
        "--images", metavar="DIR", type=Path, help="folder of the images, where it moved or the embeddings are someone else's"
    )
    parser.add_argument("--port", metavar="N", type=int, default=8000, help="port to listen on; 0: any that is free [8000]")
    parser.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help="address to listen on [127.0.0.1]")
    parser.add_argument("--allow-remote", action="store_true", help="accept other machines, for a --host that they can reach")
    _add_model(parser)
    given = parser.parse(arguments)
    if not 0 <= given.port <= 65535:
        parser.error(f"--port must be 0 to 65535, got {given.port}")
    remote = not _is_loopback(given.host)
    if remote and not given.allow_remote:
        parser.error(f"--host {given.host} lets other machines in, and the page has no password: add --allow-remote")

    import uvicorn

    from rankgrad.search.search_service import SearchService
    from rankgrad.search.searcher import Searcher
    from rankgrad.search.server import TimedProtocol, make_app

    searcher = Searcher.open(given.index, images=given.images)
    model = _load(given.run, given, default=searcher.gallery.about["checkpoint"])
    if moved := searcher.gallery.images_moved():
        print(f"note: {moved}; until then the page has no pictures", file=sys.stderr)
    app = make_app(SearchService(model, searcher), hosts=["*"] if remote else [*LOOPBACK, given.host])
    listening = _listen(given.host, given.port)
    if remote:
        print(
            f"rankgrad serve: every machine that reaches {given.host} can see the gallery and use this one's processor",
            file=sys.stderr,
        )
    shown = f"[{given.host}]" if ":" in given.host else given.host
    print(
        f"http://{shown}:{listening.getsockname()[1]}/ searches "
        f"{plural(len(searcher.gallery), searcher.gallery.images.table.noun)}; press Ctrl-C to stop",
        flush=True,
    )
    config = uvicorn.Config(
        app,
        http=TimedProtocol,
        ws="none",
        log_level="warning",
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=3,
    )
    uvicorn.Server(config).run(sockets=[listening])
    return 0


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise OSError(f"{host} port {port} cannot be listened on ({reason}): choose another with --port, 0 for any") from error


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _add_model(parser: Parser, *, device: bool = True) -> None:
    parser.add_argument("--checkpoint", choices=("best", "last"), help="which weights [best where there is one, else last]")
    if device:
        parser.add_argument("--device", metavar="NAME", default="auto", help="cpu, cuda, cuda:1 [a GPU where there is one]")


def _load_for(gallery: "Gallery", given: argparse.Namespace) -> TrainedModel:
    """The run that the command line names, or the one that made the gallery."""
    return _load(given.run or Path(gallery.about["run"]), given, default=gallery.about["checkpoint"])


def _load(run: Path, given: argparse.Namespace, default: Literal["best", "last"] | None = None) -> TrainedModel:
    """The model of `run`; `default` is the checkpoint where the command line names none."""
    device = device_named(getattr(given, "device", "cpu"))
    model = load(run, device, checkpoint=given.checkpoint or default)
    if model.debug:
        print(f"note: {run} is a debug run; its embeddings mean nothing", file=sys.stderr)
    return model
