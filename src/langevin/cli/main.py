"""Parse a command, run it, and turn what goes wrong into a line of cause and one of remedy.

Nothing heavy is imported before a command runs, so help is instant. Exit status: 0 done, 1 the work failed
(or a check did), 2 the command was wrong.
"""

import io
import os
import re
import shlex
import sys
import warnings
from contextlib import redirect_stderr
from importlib import import_module
from typing import Any

from langevin import __version__
from langevin.errors import UsageError, WorkError, one_line, unknown

# Where each command is; only that which is run is imported.
COMMANDS = {
    "list": "mixers.ListNames",
    "check": "mixers.Check",
    "bench": "mixers.Bench",
    "convert": "mixers.Convert",
    "data": "runs.Data",
    "train": "runs.Train",
    "evaluate": "evaluate.Evaluate",
    "generate": "generate.Generate",
    "predict": "predict.Predict",
    "export": "predict.Export",
    "plot": "runs.Plot",
    "compare": "studies.Compare",
    "report": "studies.Report",
    "reproduce": "studies.Reproduce",
    "doctor": "mixers.Doctor",
}


def command(name: str) -> Any:
    module, kind = COMMANDS[name].split(".")
    return getattr(import_module(f"langevin.cli.{module}"), kind)


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"]
    warnings.showwarning = _warn
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does, where letters are missing
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the memory profiler announces itself otherwise
    try:
        if arguments == ["--version"]:
            print(f"langevin {__version__}")
            return 0
        return int(_parse(arguments)())
    except KeyboardInterrupt as error:
        print(f"langevin: {str(error) or 'interrupted'}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            raise
        return _told(error, arguments)


def _helping(arguments: list[str]) -> str:
    """The command that shows all options: some commands have more of them with a run."""
    runs = (given for given in arguments[1:] if os.path.isfile(os.path.join(given, "config.yaml")))
    of_a_run = arguments[:1] in (["generate"], ["evaluate"])
    run = [shlex.quote(next(runs, "RUN"))] if of_a_run else []
    return " ".join(["langevin", *arguments[:1], *run, "--help"])


def _told(error: Exception, arguments: list[str]) -> int:
    """Say what went wrong in two lines; the exit status."""
    cause, remedy = one_line(error), getattr(error, "remedy", "")
    if isinstance(error, UsageError):
        remedy = remedy or f"See {_helping(arguments)}."
    if not isinstance(error, UsageError | WorkError | OSError):
        remedy = "This was not foreseen: add --debug for the traceback."
    print(f"langevin: {cause}", file=sys.stderr)
    if remedy:
        print(remedy, file=sys.stderr)
    return 2 if isinstance(error, UsageError) else 1


def _parse(arguments: list[str]) -> Any:
    """The command that was meant, with its options."""
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        from tyro.extras import subcommand_cli_from_dict

        about = "Train, check and fairly compare how tokens mix and how text is generated. "
        about += "Any command takes --debug, for a traceback."
        every = {name: command(name) for name in COMMANDS}
        return subcommand_cli_from_dict(every, prog="langevin", description=about, args=["--help"])
    if name not in COMMANDS:
        raise unknown("command", name, COMMANDS)
    given = arguments[1:]
    if name == "predict":
        from langevin.cli.exported import light

        if predict := light(given):
            return predict
    import tyro

    meant = command(name)
    default = meant.started(given) if hasattr(meant, "started") else tyro.MISSING_NONPROP
    kind = type(default) if hasattr(meant, "started") else meant
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return tyro.cli(kind, prog=f"langevin {name}", default=default, args=given)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise _refused(said.getvalue(), arguments, stop) from None


def _refused(said: str, arguments: list[str], error: BaseException | None) -> UsageError:
    """What settings themselves have against a command, or the option parser: its box of several lines, in
    two."""
    while error is not None:
        if isinstance(error, UsageError):
            return error
        error = error.__context__
    lines = [line.strip(" │╭╮╰╯") for line in said.splitlines()]
    lines = [line for line in lines if line and not line.startswith("─")]
    # In ASCII the box is a title and rules of dashes; what a group of options says begins with its name.
    text = re.sub(r"^([\w ]+ -{9,} )?(Error parsing \w+: )?", "", " ".join(lines))
    cause = re.split(r" Perhaps you meant| For full helptext| (?:Similar|Argument) \w+| ─| -{9}", text)[0]
    near = re.search(r"(?:Perhaps you meant:?|Similar arguments:?).*?(--[\w-]+)", text)
    meant = f"Did you mean {near[1]}? " if near else ""
    return UsageError(cause or "the options cannot be read", f"{meant}See {_helping(arguments)}.")


def _warn(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
    """A warning in one line, without the line of source that raised it."""
    print(f"langevin: warning: {message}", file=sys.stderr)
