"""Errors a user can act on: one line of cause, one of remedy."""

from collections.abc import Iterable


class _Told(Exception):
    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(f"{cause}\n{remedy}" if remedy else cause)
        self.cause = cause
        self.remedy = remedy


class UsageError(_Told, ValueError):
    """The request was wrong (exit status 2)."""


class WorkError(_Told, RuntimeError):
    """The request was right but the work failed (exit status 1)."""


class Diverged(WorkError):
    """Training left the finite numbers."""


class MissingWeights(WorkError):
    """A saved model lacks weights that its layers need."""


def unknown(kind: str, received: str, valid: Iterable[str], more: str = "") -> UsageError:
    """An error for a name that is not in a registry, naming the nearest valid one."""
    import difflib

    names = sorted(valid)
    near = difflib.get_close_matches(received, names, n=1, cutoff=0.55)
    # A short name is nearest to nothing: a repeated or contained letter is meant.
    near = near or [name for name in names if received and (name in received or received in name)]
    remedy = f"Did you mean {near[0]!r}? " if near else ""
    remedy += f"Valid: {', '.join(names) or 'none'}. {more}"
    return UsageError(f"unknown {kind} {received!r}", remedy.strip())


def one_line(error: BaseException) -> str:
    """What went wrong, in one line: the cause where it is told, else the kind of error and its message."""
    cause = getattr(error, "cause", None)
    if cause is None and isinstance(error, OSError) and error.strerror:
        cause = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if cause is None:
        message = next((line for line in str(error).splitlines() if line.strip()), "")
        cause = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return " ".join(str(cause).split())[:500]
