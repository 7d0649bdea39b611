"""The command line. Nothing heavy is imported before a command runs, so help is instant.

Exit status: 0 done, 1 the work failed (or a check did), 2 the command was wrong.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from langevin import __version__
from langevin.errors import UsageError, WorkError


@dataclass(frozen=True)
class ListNames:
    """List what langevin knows by name."""

    kind: tyro.conf.Positional[Literal["mixers", "wrappers", "aliases"]] = "mixers"
    """What to list."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        from langevin.commands import list_command

        return list_command(self.kind, self.json)


@dataclass(frozen=True)
class Check:
    """Check that a mixer, or a saved causal model, keeps its promises.

    Tries to break it: future leaks, prefixes, caches, padding, packed documents, randomness in evaluation,
    gradients, low precision, extreme inputs, compilation and the formula itself. Exit status 1 when
    something fails.

    Examples: langevin check heat ; langevin check mine.py:Mixer --against "ssmax(s=0.43)" ;
    langevin check runs/x/model
    """

    targets: tyro.conf.Positional[tuple[str, ...]] = ()
    """Mixer specs, file.py:Name, or folders of saved models; none: every mixer and wrapper."""
    against: str | None = None
    """Also compare with the formula of this mixer."""
    only: tuple[str, ...] = ()
    """Try only these properties, by name."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        from langevin.commands import check_command

        return check_command(self.targets, self.against, list(self.only) or None, self.json)


@dataclass(frozen=True)
class Bench:
    """Measure time and peak memory of mixers, as ratios to plain softmax attention in the same run.

    Example: langevin bench mixers ssmax "heat(t=0.28)" --lengths 1024 4096 --device cuda --compile
    """

    what: tyro.conf.Positional[Literal["mixers"]] = "mixers"
    """What to measure."""
    specs: tyro.conf.Positional[tuple[str, ...]] = ()
    """Mixer specs; none: every mixer."""
    lengths: tuple[int, ...] = (256, 1024, 2048)
    """Sequence lengths."""
    width: int = 256
    heads: int = 4
    tokens: int = 2048
    """Tokens per batch: the batch is tokens // length, at least 1."""
    bidirectional: bool = False
    """Measure without causality."""
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    compile: bool = False
    """Measure under torch.compile."""
    repeats: int = 10
    """Timed runs of each; the median and the interquartile range are reported."""
    json: Path | None = None
    """Also write every number to this file."""

    def run(self) -> int:
        from langevin.commands import bench_command

        return bench_command(self)


@dataclass(frozen=True)
class Convert:
    """Put a mixer into a saved transformers model.

    Example: langevin convert path/to/gpt2 "softmax+drift" --out converted
    """

    model: tyro.conf.Positional[str]
    """A folder made by save_pretrained, or a name on the Hugging Face Hub."""
    spec: tyro.conf.Positional[str]
    """The mixer, for example "heat(t='head')"."""
    out: Path
    """The folder to write."""

    def run(self) -> int:
        from langevin.commands import convert_command

        return convert_command(self.model, self.spec, self.out)


@dataclass(frozen=True)
class Doctor:
    """Say what this machine has and whether langevin works on it."""

    def run(self) -> int:
        from langevin.commands import doctor_command

        return doctor_command()


COMMANDS: dict[str, Callable[..., Any]] = {
    "list": ListNames,
    "check": Check,
    "bench": Bench,
    "convert": Convert,
    "doctor": Doctor,
}


def _parse(arguments: list[str]) -> Any:
    from tyro.extras import subcommand_cli_from_dict

    return subcommand_cli_from_dict(
        COMMANDS,
        prog="langevin",
        description="Train, check and fairly compare how tokens mix and how text is generated. "
        "Any command takes --debug, for a traceback.",
        args=arguments or ["--help"],
    )


def _warn(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
    """A warning in one line, without the line of source that raised it."""
    print(f"langevin: warning: {message}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"]
    warnings.showwarning = _warn
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the memory profiler announces itself otherwise
    try:
        if arguments == ["--version"]:
            print(f"langevin {__version__}")
            return 0
        command = _parse(arguments)
        return int(command.run())
    except (UsageError, WorkError) as error:
        if debug:
            raise
        print(f"langevin: {error.cause}", file=sys.stderr)
        if error.remedy:
            print(error.remedy, file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print("langevin: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if debug:
            raise
        print(f"langevin: {error}", file=sys.stderr)
        return 1
