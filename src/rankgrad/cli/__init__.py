"""The `rankgrad` command: a table of verbs, each a small function that imports what it needs when it is called."""

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn, TypeAlias

Verb: TypeAlias = Callable[[list[str]], int]
"""Takes the arguments after its name, returns the exit status."""

# which extra of pyproject.toml brings a module that `import rankgrad` does without
EXTRA_OF = {
    "PIL": "train",
    "faiss": "search",
    "matplotlib": "glyphs",
    "onnx": "search",
    "onnxruntime": "search",
    "onnxscript": "search",
    "pyarrow": "search",
    "python_multipart": "search",
    "safetensors": "train",
    "scipy": "train",
    "starlette": "search",
    "tensorboard": "tensorboard",
    "timm": "train",
    "torchvision": "train",
    "tqdm": "train",
    "uvicorn": "search",
}

# shows where an error came from, for whoever wants to report it
TRACEBACK = "--traceback"


def demo(arguments: list[str]) -> int:
    """Train on the built-in glyphs with several losses and compare them."""
    from rankgrad.cli.demo import main as run

    return run(arguments)


def detect(arguments: list[str]) -> int:
    """Train and test object detectors with RaMBO's AP loss."""
    from rankgrad.cli.detect_commands import main as run

    return run(arguments)


def train(arguments: list[str]) -> int:
    """Train a recipe or your own images, and test the result."""
    from rankgrad.cli.train_commands import train as run

    return run(arguments)


def evaluate(arguments: list[str]) -> int:
    """Test a trained run again."""
    from rankgrad.cli.train_commands import evaluate as run

    return run(arguments)


def recipes(arguments: list[str]) -> int:
    """List the papers' rows that can be trained, or show one whole."""
    from rankgrad.cli.train_commands import recipes as run

    return run(arguments)


def check_data(arguments: list[str]) -> int:
    """Read a data set and say what is there and what is wrong."""
    from rankgrad.cli.train_commands import check_data as run

    return run(arguments)


def plan(arguments: list[str]) -> int:
    """Measure a step of a recipe on this machine: time, memory, chunk size."""
    from rankgrad.cli.train_commands import plan as run

    return run(arguments)


def check_equivalence(arguments: list[str]) -> int:
    """Show that several processes compute what one does, for a recipe of yours."""
    from rankgrad.cli.train_commands import check_equivalence as run

    return run(arguments)


def sweep(arguments: list[str]) -> int:
    """Try a grid of settings on validation classes, then test the best."""
    from rankgrad.cli.train_commands import sweep as run

    return run(arguments)


def study(arguments: list[str]) -> int:
    """Run the papers' ablations on one data set: `rankgrad study omniglot`."""
    from rankgrad.cli.train_commands import study as run

    return run(arguments)


def protocols(arguments: list[str]) -> int:
    """Print the evaluation protocols and metrics, each with its rule."""
    from rankgrad.cli.train_commands import protocols as run

    return run(arguments)


def report(arguments: list[str]) -> int:
    """Make one HTML page of runs: curves, tables, retrieved images."""
    from rankgrad.cli.show_commands import main as run

    return run(arguments)


def embed(arguments: list[str]) -> int:
    """Embed images with the network of a run."""
    from rankgrad.cli.search_commands import main_embed as run

    return run(arguments)


def index(arguments: list[str]) -> int:
    """Make embeddings searchable."""
    from rankgrad.cli.search_commands import main_index as run

    return run(arguments)


def search(arguments: list[str]) -> int:
    """Find the images nearest to one."""
    from rankgrad.cli.search_commands import main_search as run

    return run(arguments)


def serve(arguments: list[str]) -> int:
    """Open a local page to search by image."""
    from rankgrad.cli.search_commands import main_serve as run

    return run(arguments)


def duplicates(arguments: list[str]) -> int:
    """Find near-duplicates and likely label errors among embedded images."""
    from rankgrad.cli.duplicates_command import main as run

    return run(arguments)


def export(arguments: list[str]) -> int:
    """Write the network of a run for use elsewhere."""
    from rankgrad.cli.search_commands import main_export as run

    return run(arguments)


def figures(arguments: list[str]) -> int:
    """Draw the papers' own pictures, computed anew."""
    from rankgrad.cli.figure_commands import main as run

    return run(arguments)


VERBS: Mapping[str, Verb] = {
    "demo": demo,
    "train": train,
    "eval": evaluate,
    "recipes": recipes,
    "check-data": check_data,
    "plan": plan,
    "check-equivalence": check_equivalence,
    "sweep": sweep,
    "study": study,
    "protocols": protocols,
    "report": report,
    "embed": embed,
    "index": index,
    "search": search,
    "serve": serve,
    "duplicates": duplicates,
    "export": export,
    "figures": figures,
    "detect": detect,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the `rankgrad` command."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    whole = TRACEBACK in arguments
    arguments = [argument for argument in arguments if argument != TRACEBACK]
    try:
        return _call(VERBS, arguments, command="rankgrad")
    except ModuleNotFoundError as error:
        extra = EXTRA_OF.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        print(f"rankgrad: this needs {error.name}: pip install 'rankgrad[{extra}]'", file=sys.stderr)
        return 1
    except (ValueError, OSError, RuntimeError) as error:
        if whole or not _is_for_the_user(error):
            raise
        from rankgrad.cli.launch import tell

        return tell(" ".join(["rankgrad", *arguments[:1]]), _in_flags(error))
    except KeyboardInterrupt:
        # what a shell reports for a command ended by Ctrl-C
        return 130


def _call(verbs: Mapping[str, Verb], arguments: list[str], *, command: str) -> int:
    """Hand the rest of `arguments` to the verb that stands first among them."""
    width = max(map(len, verbs))
    parser = argparse.ArgumentParser(
        prog=command,
        epilog="\n".join(["verbs:", *(f"  {name:{width}} {verb.__doc__}" for name, verb in verbs.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rankgrad {_version()}")
    parser.add_argument("verb", metavar="VERB", help=f"one of {', '.join(verbs)}; VERB --help tells more")
    parser.add_argument("rest", metavar="...", nargs=argparse.REMAINDER, help="arguments of the verb")
    chosen = parser.parse_args(arguments or ["--help"])
    if chosen.verb not in verbs:
        near = difflib.get_close_matches(chosen.verb, verbs, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(verbs)}"
        parser.error(f"unknown verb {chosen.verb!r}: {hint}")
    return verbs[chosen.verb](chosen.rest)


def _in_flags(error: Exception) -> Exception:
    """The same error, whose message names settings as flags."""
    from rankgrad.cli.parser import in_flags
    from rankgrad.detection.detection_recipe import DetectionRecipe
    from rankgrad.runs.recipe import settings_of
    from rankgrad.runs.retrieval_recipe import RetrievalRecipe

    text = in_flags(str(error), {**settings_of(RetrievalRecipe), **settings_of(DetectionRecipe)})
    if text != str(error):
        error.args = (text,)
    return error


def _is_for_the_user(error: Exception) -> bool:
    """Whether the message alone says what to do: wrong input, files, a run that cannot go on. Other errors are bugs."""
    if isinstance(error, (ValueError, OSError)):
        return True
    from rankgrad.train.errors import TrainingError
    from rankgrad.train.processes import is_lost, launched

    return isinstance(error, TrainingError) or (launched() and is_lost(error))


def _version() -> str:
    """As installed, which is known without loading torch; else of the source that runs."""
    try:
        return version("rankgrad")
    except PackageNotFoundError:
        import rankgrad

        return rankgrad.__version__


def _run_as_module() -> NoReturn:
    """`python -m rankgrad.cli`, which is how torchrun starts it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        sys.exit(main())
    from rankgrad.cli.launch import stop_with_launcher
    from rankgrad.train.processes import leave

    stop_with_launcher()
    leave(main())
