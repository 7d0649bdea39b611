"""The command line. Nothing heavy is imported before a command runs, so help is instant.

Exit status: 0 done, 1 the work failed (or a check did), 2 the command was wrong.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import tyro

from langevin import __version__
from langevin.cli_mixers import Bench, Check, Convert, Doctor, ListNames
from langevin.cli_runs import Data, Evaluate, Generate, Plot, Train
from langevin.cli_studies import Compare, Report, Reproduce
from langevin.errors import UsageError, WorkError
from langevin.training.config import TrainConfig

COMMANDS: dict[str, Callable[..., Any]] = {
    "list": ListNames,
    "check": Check,
    "bench": Bench,
    "convert": Convert,
    "data": Data,
    "train": Train,
    "evaluate": Evaluate,
    "generate": Generate,
    "plot": Plot,
    "compare": Compare,
    "report": Report,
    "reproduce": Reproduce,
    "doctor": Doctor,
}


def _parse(arguments: list[str]) -> Any:
    from tyro.extras import subcommand_cli_from_dict

    file = _config(arguments)
    if file is not None:
        default = Train(TrainConfig.read(file)) if arguments[0] == "train" else Compare.planned(file)
        if any(a.partition("=")[0] in ("--tokens", "--steps", "--minutes") for a in arguments):
            none = replace(default.settings, tokens=None, steps=None, minutes=None)
            default = replace(default, settings=none)  # one budget takes the place of another
        return tyro.cli(type(default), prog=f"langevin {arguments[0]}", default=default, args=arguments[1:])
    return subcommand_cli_from_dict(
        COMMANDS,
        prog="langevin",
        description="Train, check and fairly compare how tokens mix and how text is generated. "
        "Any command takes --debug, for a traceback.",
        args=arguments or ["--help"],
    )


def _config(arguments: list[str]) -> Path | None:
    """The file of --config, whose settings are the defaults of the other flags."""
    if arguments[:1] not in (["train"], ["compare"]):
        return None
    for flag, value in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, inside = flag.partition("=")
        if name == "--config" and (inside or value):
            return Path(inside if equals else value)
    return None


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
