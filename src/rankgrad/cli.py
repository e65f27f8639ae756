"""The `rankgrad` command: a table of verbs, each a small function that imports what it needs when it is called."""

import argparse
import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TypeAlias

Verb: TypeAlias = Callable[[list[str]], int]
"""Takes the arguments after its name, returns the exit status."""

# which extra of pyproject.toml brings a module that `import rankgrad` does without
EXTRA_OF = {
    "PIL": "glyphs",
    "matplotlib": "glyphs",
    "pytorch_metric_learning": "bench",
    "timm": "vision",
    "torchvision": "vision",
}


def demo(arguments: list[str]) -> int:
    """Train on the built-in glyphs with several losses and compare them."""
    from rankgrad.demo import main as run

    return run(arguments)


def bench(arguments: list[str]) -> int:
    """Measure time and memory beside other implementations: `rankgrad bench losses`."""
    verbs: Mapping[str, Verb] = {"losses": bench_losses, "kernels": bench_kernels, "plot": bench_plot}
    return _call(verbs, arguments, command="rankgrad bench")


def bench_losses(arguments: list[str]) -> int:
    """Every loss against the dense formulation, pytorch-metric-learning and a loop."""
    from rankgrad.bench.losses import main as run

    return run(arguments)


def bench_kernels(arguments: list[str]) -> int:
    """The fused GPU kernels against their targets, other formulations and the matrix products alone."""
    from rankgrad.bench.kernels import main as run

    return run(arguments)


def bench_plot(arguments: list[str]) -> int:
    """Draw time and memory against batch size from the rows that `kernels` wrote."""
    from rankgrad.bench.plot import main as run

    return run(arguments)


VERBS: Mapping[str, Verb] = {"demo": demo, "bench": bench}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the `rankgrad` command."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _call(VERBS, arguments, command="rankgrad")
    except ModuleNotFoundError as error:
        extra = EXTRA_OF.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        print(f"rankgrad: this needs {error.name}: pip install 'rankgrad[{extra}]'", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        # what a shell reports for a command ended by Ctrl-C
        return 130


def _call(verbs: Mapping[str, Verb], arguments: list[str], *, command: str) -> int:
    """Hand the rest of `arguments` to the verb that stands first among them."""
    parser = argparse.ArgumentParser(
        prog=command,
        epilog="\n".join(["verbs:", *(f"  {name:8} {verb.__doc__}" for name, verb in verbs.items())]),
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


def _version() -> str:
    """As installed, which is known without loading torch; else of the source that runs."""
    try:
        return version("rankgrad")
    except PackageNotFoundError:
        import rankgrad

        return rankgrad.__version__
