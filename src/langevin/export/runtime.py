"""A classifier in an ONNX file, run by onnxruntime: torch and transformers are not imported.

Beside the file stand tokenizer.json and labels.json, which holds the names of the classes and how a text
is read. The ONNX file names the checksum of labels.json, and that the one of tokenizer.json: files of two
exports do not mix.

On small machines memory counts: nothing is imported that is not needed (hashlib takes 4 MB), and numpy only
when the tokenizer has given back what it took to be read.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langevin.errors import UsageError, one_line
from langevin.export.tokens import encoder

if TYPE_CHECKING:
    from numpy.typing import NDArray

MARK = "langevin.labels"  # the property of an ONNX file that holds the checksum of labels.json
LABELS, TOKENIZER = "labels.json", "tokenizer.json"
INPUTS = ("input_ids", "attention_mask")


class OnnxClassifier:
    """Texts to the calibrated probabilities of classes, on so many threads (0: all cores)."""

    def __init__(self, file: Path, *, batch: int = 64, threads: int = 0) -> None:
        told, stored = _read(file, LABELS), _read(file, TOKENIZER)
        labels = _object(told)
        self.names: list[str] = labels.get("labels", [])
        self.text_column: str | None = labels.get("text_column")
        if stored and checksum(stored) == labels.get("tokenizer"):  # first: the session takes what it frees
            self.tokens = encoder(stored)
        self.session = session_of(file, threads)
        mark = self.session.get_modelmeta().custom_metadata_map.get(MARK)
        if mark is None:
            raise UsageError(
                f"{file} is not a classifier made by langevin", "Give a file made by langevin export."
            )
        for name, content, known in ((LABELS, told, mark), (TOKENIZER, stored, None)):
            if content is None:
                raise UsageError(f"{file} has no {name} beside it", "Keep the files of an export together.")
            if checksum(content) != (known or labels["tokenizer"]):
                raise UsageError(
                    f"the {name} beside {file} is of another model, or damaged",
                    "Keep the files of an export together.",
                )
        self.reads: dict[str, Any] = {
            "around": (labels["before"], labels["behind"]),
            "context": labels["context"],
            "pad": labels["pad"],
            "batch": batch,
        }

    def __call__(self, texts: Sequence[str]) -> NDArray[Any]:
        from langevin.data.reading import classified

        tokens = self.tokens([text.strip() for text in texts])
        return classified(tokens, **self.reads, probabilities=self.probabilities)

    def probabilities(self, **rows: NDArray[Any]) -> NDArray[Any]:
        """(B, C) of padded rows of tokens."""
        found: NDArray[Any] = self.session.run(None, rows)[0]
        return found


def checksum(content: bytes) -> str:
    return f"{zlib.crc32(content):08x}"


def _read(file: Path, name: str) -> bytes | None:
    beside = file.parent / name
    return beside.read_bytes() if beside.is_file() else None


def _object(content: bytes | None) -> dict[str, Any]:
    """What labels.json says, or nothing if it is damaged: its checksum tells, once there is a session."""
    try:
        found = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def session_of(file: Path, threads: int) -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise UsageError(
            "onnxruntime is not installed", "Run pip install onnxruntime, or pip install 'langevin[edge]'."
        ) from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of a class for each kind of damage
        raise UsageError(f"{file} cannot be run: {one_line(error)}", "Export it again.") from None
