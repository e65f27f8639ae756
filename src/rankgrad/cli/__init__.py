"""The `rankgrad` command: a table of its commands."""

import argparse
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import NoReturn

from rankgrad._messages import did_you_mean, install_hint, printable

# which extra of pyproject.toml brings a module that `import rankgrad` does without
EXTRA_OF = {
    "PIL": "train",
    "faiss": "search",
    "huggingface_hub": "train",
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

# what a shell reports for a command ended by Ctrl-C, and for one whose reader has gone
INTERRUPTED, CLOSED_PIPE = 130, 141

# shows where an error came from, for whoever wants to report it
TRACEBACK = "--traceback"
# lets a run name a function as its trunk, which is imported and called; see rankgrad.models.trust_factory
TRUST_CODE = "--trust-code"


@dataclass(frozen=True)
class Command:
    """What follows `rankgrad` on the command line: a function of a module in this package, imported when it is called.

    The function takes the arguments after the command, and the task where several share it, and returns the exit status.
    """

    module: str
    function: str
    help: str
    task: str = ""

    def __call__(self, arguments: list[str]) -> int:
        function = getattr(import_module(f"rankgrad.cli.{self.module}"), self.function)
        return int(function(arguments, self.task) if self.task else function(arguments))


COMMANDS: Mapping[str, Command] = {
    "demo": Command("demo", "main", "Train on the built-in glyphs with several losses and compare them."),
    "train": Command("train_commands", "train", "Train a recipe, or your own images or texts, and test the result."),
    "eval": Command("train_commands", "evaluate", "Test a trained run again."),
    "recipes": Command("show_commands", "recipes", "List the papers' results that can be trained, or show one in full."),
    "check-data": Command("data_commands", "check_data", "Read a data set and report what is there and what is wrong."),
    "plan": Command("train_commands", "plan", "Measure a training step on this machine: time, memory, chunk size."),
    "compile": Command("train_commands", "compile_ahead", "Compile the kernels of training for a GPU that need not be there."),
    "check-equivalence": Command("train_commands", "check_equivalence", "Verify that several processes compute what one does."),
    "sweep": Command("train_commands", "sweep", "Try a grid of settings on validation classes, then test the best."),
    "study": Command("train_commands", "study", "Run the papers' ablations on one data set: `rankgrad study omniglot`."),
    "protocols": Command("show_commands", "protocols", "Print the evaluation protocols and metrics with their definitions."),
    "report": Command("show_commands", "report", "Write one HTML page about runs: curves, tables, what they retrieve."),
    "embed": Command("search_commands", "main_embed", "Embed images or texts with the network of a run."),
    "index": Command("search_commands", "main_index", "Build a search index of embeddings."),
    "search": Command("search_commands", "main_search", "Find the images or texts of a gallery that are most similar to one."),
    "predict": Command("search_commands", "main_predict", "Label images or texts by their nearest neighbours in a gallery."),
    "serve": Command("search_commands", "main_serve", "Open a local page to search by image or text."),
    "duplicates": Command("duplicates_command", "main", "Find near-duplicates and likely label errors among embeddings."),
    "card": Command("card_command", "main", "Write a model card, and a folder with the model to share."),
    "export": Command("search_commands", "main_export", "Write the network of a run for use elsewhere."),
    "figures": Command("show_commands", "figures", "Draw the papers' figures from new computations."),
    "detect": Command("train_commands", "detect", "Train and test object detectors with RaMBO's AP loss."),
}
DETECT_COMMANDS: Mapping[str, Command] = {
    "train": Command("train_commands", "train", "Train a recipe and test the result.", "detection"),
    "eval": Command("train_commands", "evaluate", "Test a trained run again.", "detection"),
    "report": Command(
        "show_commands", "report", "Write one HTML page about runs: AP of classes, curves, images with boxes.", "detection"
    ),
    "recipes": Command(
        "show_commands", "recipes", "List the paper's results that can be trained, or show one in full.", "detection"
    ),
    "plan": Command(
        "train_commands", "plan", "Measure a training step on this machine, and the loss's part in it.", "detection"
    ),
    "study": Command("train_commands", "study", "Compare cross-entropy with the AP loss on the same budget.", "detection"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the `rankgrad` command."""
    try:
        try:
            return _run(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            # now, and not when the interpreter ends, which would print a traceback for a closed pipe
            sys.stdout.flush()
    except BrokenPipeError:
        # whoever read our output, `head` for instance, has seen enough
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE


def _run(arguments: list[str]) -> int:
    show_traceback, trusting = TRACEBACK in arguments, TRUST_CODE in arguments
    arguments = [argument for argument in arguments if argument not in (TRACEBACK, TRUST_CODE)]
    _trust_factories(arguments, everything=trusting)
    command = " ".join(["rankgrad", *arguments[: 2 if arguments[:1] == ["detect"] else 1]])
    try:
        return call_command(COMMANDS, arguments, prog="rankgrad", version=f"rankgrad {_version()}")
    except ModuleNotFoundError as error:
        message = str(error)
        if message.startswith("No module named"):
            extra = EXTRA_OF.get((error.name or "").partition(".")[0])
            if extra is None:
                raise
            message = f"this needs {error.name}. Install it with {install_hint(extra)}"
        print(f"{command}: {message}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        raise
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        if show_traceback or not _is_for_the_user(error):
            raise
        from rankgrad.cli.launch import report_error

        return report_error(command, _for_the_command_line(error))
    except KeyboardInterrupt:
        return INTERRUPTED


def _trust_factories(arguments: list[str], *, everything: bool) -> None:
    """Trust the trunk that the user typed, `--trunk package.module:factory`, or with `--trust-code` any that a run names."""
    typed = [value for flag, value in pairwise(arguments) if flag == "--trunk"]
    typed += [argument.partition("=")[2] for argument in arguments if argument.startswith("--trunk=")]
    names = ["*"] if everything else [name for name in typed if ":" in name]
    if names:
        from rankgrad.models import trust_factory

        for name in names:
            trust_factory(name)


def call_command(commands: Mapping[str, Command], arguments: list[str], *, prog: str, version: str = "") -> int:
    """Pass the rest of `arguments` to the command that comes first among them."""
    width = max(map(len, commands))
    parser = argparse.ArgumentParser(
        prog=prog,
        epilog="\n".join(["commands:", *(f"  {name:{width}} {command.help}" for name, command in commands.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if version:
        parser.add_argument("--version", action="version", version=version)
    parser.add_argument("command", metavar="COMMAND", help="one of those below; COMMAND --help describes its arguments")
    parser.add_argument("rest", metavar="...", nargs=argparse.REMAINDER, help="arguments of the command")
    chosen = parser.parse_args(arguments or ["--help"])
    if chosen.command not in commands:
        parser.error(f"unknown command {chosen.command!r}: {did_you_mean(chosen.command, commands)}")
    return commands[chosen.command](chosen.rest)


def _for_the_command_line(error: Exception) -> Exception:
    """The same error, whose message names settings as flags and no function of the library, without control characters."""
    from rankgrad.cli.parser import in_flags, without_caller
    from rankgrad.detection.detection_recipe import DetectionRecipe
    from rankgrad.runs.recipe import settings_of
    from rankgrad.runs.retrieval_recipe import RetrievalRecipe
    from rankgrad.train import errors

    if errors.is_out_of_memory(error):
        return errors.TrainingError(errors.describe_out_of_memory(error))
    if errors.is_killed_worker(error):
        return errors.TrainingError(errors.describe_killed_worker(error))
    text = in_flags(without_caller(str(error)), {**settings_of(RetrievalRecipe), **settings_of(DetectionRecipe)})
    # names of files and classes may hold anything
    text = "\n".join(map(printable, text.split("\n")))
    if text != str(error):
        error.args = (text,)
    return error


def _is_for_the_user(error: Exception) -> bool:
    """Whether the message alone says what to do: wrong input, files, a run that cannot go on. Other errors are bugs."""
    if isinstance(error, (ValueError, OSError)):
        return True
    from rankgrad.train.errors import TrainingError, is_killed_worker, is_out_of_memory
    from rankgrad.train.processes import is_lost_process, launched

    if isinstance(error, TrainingError) or is_out_of_memory(error) or is_killed_worker(error):
        return True
    return launched() and is_lost_process(error)


def _version() -> str:
    """As installed, which is known without loading torch; else of the source that runs."""
    try:
        return version("rankgrad")
    except PackageNotFoundError:
        import rankgrad

        return rankgrad.__version__


def run_as_module() -> NoReturn:
    """`python -m rankgrad.cli`, which is how torchrun starts it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        sys.exit(main())
    from rankgrad.cli.launch import stop_with_launcher
    from rankgrad.train.processes import exit_process

    stop_with_launcher()
    exit_process(main())
