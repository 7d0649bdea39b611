"""Tokenizers by name: `bytes`, `chars`, `bpe-N`, or any transformers tokenizer (a folder or a Hub name).

All are transformers' fast tokenizers, so they are saved beside a model and load with AutoTokenizer. The
first three give every text back exactly and end documents with `<|endoftext|>`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from langevin.data.folders import data_root
from langevin.data.hub import reachable
from langevin.data.texts import SEPARATOR, chunks
from langevin.errors import UsageError, unknown

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

UNKNOWN = "<|unknown|>"
"""Stands for characters that the training text does not have, where another split does."""

OWN = ("bytes", "chars", "bpe-4096")
BPE = re.compile(r"bpe-(\d+)")
SMALLEST_BPE = 257  # every byte, and the end of text

Encode = Callable[[list[str]], Iterator[np.ndarray]]
"""Texts to token ids, one array a text."""


@dataclass(frozen=True)
class Made:
    """A tokenizer and the fastest way to use it on much text."""

    tokenizer: PreTrainedTokenizerFast
    encode: Encode
    has_unknown: bool = False


def is_made_here(name: str) -> bool:
    """Whether the tokenizer is made from the name and the training text; a wrong `bpe-N` raises."""
    if name in ("bytes", "chars"):
        return True
    if (match := BPE.fullmatch(name)) is None:
        return False
    if int(match[1]) < SMALLEST_BPE:
        raise UsageError(
            f"{name} is too small: every byte and the end of text make {SMALLEST_BPE}",
            f"Use bpe-{SMALLEST_BPE} or more, or the tokenizer bytes.",
        )
    return True


def make(name: str, texts: list[str], others: list[str]) -> Made:
    """Make a tokenizer from the training texts. The others only decide whether chars needs `UNKNOWN`."""
    if name == "bytes":
        return Made(_wrapped(_bytes()), _encode_bytes)
    if name == "chars":
        characters = sorted(_characters(texts))
        has_unknown = not _characters(others) <= set(characters)
        backend = _chars(characters, has_unknown)
        return Made(_wrapped(backend, has_unknown), _char_encoder(characters), has_unknown)
    tokenizer = _wrapped(_bpe(int(name.removeprefix("bpe-")), texts))
    return Made(tokenizer, encoder(tokenizer))


def load(name: str) -> PreTrainedTokenizerFast:
    """A transformers tokenizer from a folder, from `$LANGEVIN_DATA/models/`, or from the Hub."""
    from transformers import AutoTokenizer

    root = data_root()
    known = [] if root is None else [root / "models" / f"{name}-tokenizer", root / "models" / name]
    folder = next((path for path in (Path(name).expanduser(), *known) if path.is_dir()), None)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder or name, local_files_only=True)
    except (OSError, ValueError) as error:
        if folder is not None:
            reason = str(error).partition("\n")[0]
            raise UsageError(
                f"{folder} is not a tokenizer's folder: {reason}", "It needs tokenizer.json."
            ) from None
        tokenizer = _from_hub(name, known)
    if tokenizer.eos_token_id is None:
        raise UsageError(
            f"the tokenizer {name} has no end-of-text token", "Set its eos_token and save it again."
        )
    return tokenizer


def _from_hub(name: str, known: list[Path]) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer

    looked_for = known[0] if known else f"$LANGEVIN_DATA/models/{name}-tokenizer (LANGEVIN_DATA is not set)"
    cause = f"unknown tokenizer {name!r}: no folder {name} or {looked_for}"
    remedy = (
        f"{unknown('tokenizer', name, OWN).remedy} Or a tokenizer's folder (set LANGEVIN_DATA to a folder "
        "that has it under models/), or its name on the Hugging Face Hub."
    )
    if not reachable():
        raise UsageError(f"{cause}, and the Hugging Face Hub cannot be reached", remedy)
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        raise UsageError(f"{cause}, and the Hugging Face Hub has none for us", remedy) from None


def fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """sha256 of all that decides the ids of a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{content} eos={tokenizer.eos_token_id}".encode()).hexdigest()


def encoder(tokenizer: PreTrainedTokenizerFast) -> Encode:
    """Encode with the tokenizer itself, long texts in pieces, without special tokens."""

    def encode(texts: list[str]) -> Iterator[np.ndarray]:
        pieces = [list(chunks(text)) for text in texts]
        flat = [piece for some in pieces for piece in some]
        ids = iter(_encode_batch(tokenizer, flat))
        for some in pieces:
            yield np.concatenate([np.asarray(next(ids), np.int64) for _ in some])

    return encode


def _encode_batch(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return ids
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]


def _wrapped(backend: Tokenizer, has_unknown: bool = False) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=SEPARATOR,
        unk_token=UNKNOWN if has_unknown else None,
        clean_up_tokenization_spaces=False,
    )


def _bytes() -> Tokenizer:
    """Token b is byte b; 256 is the end of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.BPE(vocab={sign: byte for byte, sign in enumerate(_byte_signs())}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([SEPARATOR])
    return tokenizer


def _byte_signs() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE: itself, or one from 256 on."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _encode_bytes(texts: list[str]) -> Iterator[np.ndarray]:
    for text in texts:
        yield np.frombuffer(text.encode(), np.uint8)


def _characters(texts: list[str]) -> set[str]:
    return set().union(*(set(text) for text in texts))


def _chars(characters: list[str], has_unknown: bool) -> Tokenizer:
    """Token k is the k-th character by code point; then the end of text; then, if need be, UNKNOWN."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: index for index, character in enumerate(characters)}
    vocabulary[SEPARATOR] = len(vocabulary)
    if has_unknown:
        vocabulary[UNKNOWN] = len(vocabulary)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([SEPARATOR, UNKNOWN] if has_unknown else [SEPARATOR])
    return tokenizer


def _char_encoder(characters: list[str]) -> Encode:
    points = np.array([ord(character) for character in characters], np.uint32)
    table = np.full(0x110000, len(characters) + 1, np.uint32)  # UNKNOWN comes after the end of text
    table[points] = np.arange(len(points), dtype=np.uint32)

    def encode(texts: list[str]) -> Iterator[np.ndarray]:
        for text in texts:
            yield table[np.frombuffer(text.encode("utf-32-le"), "<u4")]

    return encode


def _bpe(size: int, texts: list[str]) -> Tokenizer:
    """Byte-level BPE with up to `size` tokens; fewer when the text has no more pairs to merge."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[SEPARATOR],
        initial_alphabet=_byte_signs(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in chunks(text)), trainer)
    return tokenizer


def encode_prompt(tokenizer, text):
    ids = list(tokenizer(text).input_ids) if text else []
    return ids or [tokenizer.eos_token_id]
