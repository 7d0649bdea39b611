"""Files that are whole or not there, and checked when they are read."""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from langevin.errors import UsageError, WorkError


def write_text(path: Path, text: str) -> None:
    """In one move: whoever reads, and whenever the machine stops, the file is the old one or the new."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.writing")
    try:
        with open(draft, "x", encoding="utf-8", errors="backslashreplace", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        flush(path.parent)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise not_written(path, error) from error


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def append_json(path: Path, value: Any) -> None:
    """A line more; what reads such a file leaves out a last one that is torn."""
    try:
        path.parent.mkdir(exist_ok=True)
        line = json.dumps(value, ensure_ascii=False) + "\n"
        with open(path, "ab", buffering=0) as file:  # in one write: whole, or torn at the end of the file
            file.write(line.encode(errors="backslashreplace"))
    except OSError as error:
        raise not_written(path, error) from error


def write_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Let fill(folder) make a folder beside the target, and put it in the target's place.

    Between its two moves only `.NAME.old` is there: `standing` finds it for a reader, and the next writer
    brings it back. One process at a time (see `Lock`).
    """
    fresh, old = target.with_name(f".{target.name}.writing"), target.with_name(f".{target.name}.old")
    try:
        remove(fresh)
        fresh.mkdir(parents=True)
        fill(fresh)
        for path in (*fresh.rglob("*"), fresh):
            flush(path)
        if os.path.lexists(target):
            remove(old)
            os.replace(target, old)
        os.replace(fresh, target)
        flush(target.parent)
        with suppress(OSError):
            remove(old)
    except BaseException as error:
        from safetensors import SafetensorError

        with suppress(OSError):
            if not target.exists() and old.exists():
                os.replace(old, target)
            remove(fresh)
        if isinstance(error, OSError | SafetensorError):
            raise not_written(target, error) from error
        raise


def standing(target: Path) -> Path:
    """Where the newest whole version of a folder is that a writer may be replacing."""
    old = target.with_name(f".{target.name}.old")
    return next((path for path in (target, old, target) if path.is_dir()), target)


def not_written(path: Path, error: Exception) -> WorkError:
    return WorkError(
        f"{path} could not be written: {reason(error)}",
        "Free some space, or see who may write there; what was there before is whole.",
    )


def not_read(path: Path, error: Exception) -> UsageError:
    return UsageError(
        f"{path} cannot be read: {reason(error)}", "See that it is there, and who may read it."
    )


def remove(path: Path) -> None:
    """Whatever it is: a folder, a file, a link, or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Onto the disk: a file's content, or a folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(*files: Path) -> str:
    """Of the bytes of one file; of several, of their hashes."""
    digests = []
    for path in files:
        try:
            with open(path, "rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as error:
            raise not_read(path, error) from error
    return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()


def changed(path: Path, size: int, digest: str) -> str | None:
    """What became of a file that had this size and sha256; None: nothing."""
    if not path.is_file():
        return "is missing"
    if path.stat().st_size != size:
        return f"has {path.stat().st_size:,} bytes instead of {size:,}"
    return "was changed" if sha256(path) != digest else None


def read_json(path: Path, shape: Any = dict, remedy: str = "", *, optional: bool = False) -> Any:
    """What a JSON file holds, which must have this shape (see `misfit`); a UsageError says what is wrong.

    optional: None where there is no such file.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        if optional:
            return None
        raise UsageError(f"there is no {path}", remedy or "Bring it back from a copy.") from None
    except OSError as error:
        raise not_read(path, error) from error
    try:
        value = json.loads(text.decode())
        problem = misfit(value, shape)
    except UnicodeDecodeError:
        problem = "it is not UTF-8 text"
    except ValueError as error:
        problem = f"it is not JSON ({reason(error)})"
    except RecursionError:
        problem = "it is nested too deep"
    if problem is not None:
        raise UsageError(
            f"{path} is damaged: {problem}", remedy or "Bring it back from a copy, or delete it."
        )
    return value


def misfit(value: Any, shape: Any, where: str = "it") -> str | None:
    """Where a value of JSON differs from a shape, in words; None: it fits.

    A shape is a type (a float may be whole, a number is no bool), a literal, a tuple of shapes of which one
    must fit, [shape] for a list of such, {"key": shape} for a table with these keys and perhaps more, or
    {str: shape} for one whose values are all such.
    """
    if isinstance(shape, tuple):
        problems = [misfit(value, one, where) for one in shape]
        return None if None in problems else problems[-1]
    if isinstance(shape, list):
        items = enumerate(value) if isinstance(value, list) else None
        found = [misfit(x, shape[0], f"{where}[{i}]") for i, x in items or ()]
        return f"{where} is not a list" if items is None else next(filter(None, found), None)
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{where} is not a table"
        for key, inner in shape.items():
            if key is not str and key not in value:
                return f"{where} has no {key}"
            for name in value if key is str else [key]:
                problem = misfit(value[name], inner, name if where == "it" else f"{where}.{name}")
                if problem is not None:
                    return problem
        return None
    if not isinstance(shape, type):
        return None if value == shape else f"{where} is {value!r:.60}, not {shape!r}"
    fits = isinstance(value, int | float if shape is float else shape)
    if fits and not (isinstance(value, bool) and shape is not bool):
        return None
    return f"{where} is {value!r:.60}, not {_WORDS.get(shape, shape.__name__)}"


_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "true or false",
    dict: "a table",
    list: "a list",
}


def reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
