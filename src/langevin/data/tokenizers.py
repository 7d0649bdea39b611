"""Tokenizers by name: `bytes`, `chars`, `bpe-N`, `words`, `spaces`, or a fast transformers tokenizer (a
folder or a Hub name).

All are transformers' fast tokenizers, so they are saved beside a model and load with AutoTokenizer. The
first three give every text back exactly; `words` (small letters, marks apart) and `spaces` (what stands
between white space) do not. All of these end documents with `<|endoftext|>`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from langevin.data.hub import data_root, reachable
from langevin.data.texts import SEPARATOR
from langevin.errors import UsageError, one_line, unknown

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

UNKNOWN = "<|unknown|>"
"""Stands for characters that the training text does not have, where another split does, or may."""

OTHER = "<|other|>"
"""Stands for words that are not in the vocabulary."""

OWN = ("bytes", "chars", "words", "spaces", "bpe-4096")
BPE = re.compile(r"bpe-0*([0-9]+)")
SMALLEST_BPE = 257  # every byte, and the end of text
LARGEST_BPE = 1_000_000  # several times the largest vocabularies in use
MOST_WORDS = 30_000  # of `words`, each of which the training text has twice or more

Encode = Callable[[list[str], bool], Iterator[tuple[np.ndarray, np.ndarray | None]]]
"""Texts to token ids; and, if asked for, the number of characters up to the end of each token."""


def is_made_here(name: str) -> bool:
    """Whether the tokenizer is made from the name and the training text; a wrong `bpe-N` raises."""
    if not name:
        raise UsageError(
            "the tokenizer has no name", f"Leave it out for the usual one, or use {', '.join(OWN)}."
        )
    if name in OWN[:4]:
        return True
    if (match := BPE.fullmatch(name)) is None:
        return False
    if len(match[1]) > 7 or int(match[1]) > LARGEST_BPE:
        raise UsageError(f"{name[:40]} is too large", f"Use bpe-{LARGEST_BPE} or less.")
    if int(match[1]) < SMALLEST_BPE:
        raise UsageError(
            f"{name} is too small: every byte and the end of text make {SMALLEST_BPE}",
            f"Use bpe-{SMALLEST_BPE} or more, or the tokenizer bytes.",
        )
    return True


def make(
    name: str, texts: Iterable[str], others: Iterable[str], *, any_text: bool = False
) -> PreTrainedTokenizerFast:
    """Make a tokenizer from the training texts. The others only decide whether chars needs `UNKNOWN`.

    any_text: it needs it whatever they have. A classifier is asked about texts of others; a language model
    writes, and a token that no training text has would only take probability from the rest.
    """
    if name == "bytes":
        return _wrapped(_bytes())
    if name == "chars":
        characters = sorted(set(chain.from_iterable(texts)))
        has_unknown = any_text or not set(characters).issuperset(chain.from_iterable(others))
        return _wrapped(_chars(characters, has_unknown), UNKNOWN if has_unknown else None)
    if name in ("words", "spaces"):
        return _wrapped(_words(name == "words", texts), OTHER)
    return _wrapped(_bpe(int(name.removeprefix("bpe-")), texts))


def load(name: str) -> PreTrainedTokenizerFast:
    """A transformers tokenizer from a folder, from `$LANGEVIN_DATA/models/`, or from the Hub."""
    from transformers import AutoTokenizer

    root = data_root()
    known = [] if root is None else [root / "models" / f"{name}-tokenizer", root / "models" / name]
    folder = next((path for path in (Path(name).expanduser(), *known) if os.path.isdir(path)), None)
    if folder is not None:
        return load_tokenizer(folder)
    online = False
    for online in (False, True) if reachable() else (False,):
        with suppress(OSError, ValueError):
            found = AutoTokenizer.from_pretrained(
                name, local_files_only=not online, trust_remote_code=False
            )
            break
    else:
        looked = known[0] if known else f"$LANGEVIN_DATA/models/{name}-tokenizer (LANGEVIN_DATA is not set)"
        hub = "has none for us" if online else "cannot be reached"
        raise UsageError(
            f"unknown tokenizer {name!r}: no folder {name} or {looked}, and the Hugging Face Hub {hub}",
            f"{unknown('tokenizer', name, OWN).remedy} Or a tokenizer's folder (set LANGEVIN_DATA to a "
            "folder that has it under models/), or its name on the Hugging Face Hub.",
        )
    return _checked(found, name)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that `save_pretrained` wrote into a folder. Code that came with it is never run."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UsageError(f"{folder} holds no tokenizer: no file {file}", "Save the tokenizer there again.")
    try:
        saved = Tokenizer.from_file(str(file))
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the libraries raise whatever the damage leads to
        raise UsageError(
            f"the tokenizer in {folder} cannot be loaded: {one_line(error)}",
            "Save it there again: tokenizer.json and tokenizer_config.json, without code of its own.",
        ) from None
    if tokenizer.eos_token is not None and saved.token_to_id(tokenizer.eos_token) is None:
        raise UsageError(
            f"the tokenizer in {folder} has no end-of-text token: {file.name} does not have "
            f"{tokenizer.eos_token!r}",
            "Set its eos_token and save it again.",
        )
    return _checked(tokenizer, str(folder))


def _checked(tokenizer: Any, name: str) -> PreTrainedTokenizerFast:
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise UsageError(f"{name} is not a fast tokenizer", "Use one that has a tokenizer.json.")
    if tokenizer.eos_token_id is None and tokenizer.sep_token_id is not None:
        tokenizer.eos_token = tokenizer.sep_token  # BERT's ends a text
    if tokenizer.eos_token_id is None:
        raise UsageError(
            f"the tokenizer {name} has no end-of-text token", "Set its eos_token and save it again."
        )
    return tokenizer


def fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """sha256 of all that decides the ids of a text."""
    content = f"{tokenizer.backend_tokenizer.to_str()} eos={tokenizer.eos_token_id}"
    return hashlib.sha256(content.encode()).hexdigest()


def vocabulary(tokenizer: PreTrainedTokenizerFast) -> int:
    """How many ids a model needs: the largest and one. There may be fewer tokens, with gaps between."""
    return int(max(tokenizer.get_vocab().values())) + 1


def first_token(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """The token that the tokenizer itself puts before a text (Llama: BOS), if any."""
    bos = tokenizer.bos_token_id
    return bos if bos is not None and tokenizer("").input_ids[:1] == [bos] else None


def encode_prompt(
    tokenizer: PreTrainedTokenizerFast, text: str, data: Mapping[str, Any] | None = None
) -> list[int]:
    """The tokens a model goes on from, as its training text had them.

    data: the manifest of the corpus it was trained on; None for a model from elsewhere, whose tokenizer
    is taken at its word. The beginning-of-text token comes first where documents had it. An empty prompt
    is what a text begins after: the token between documents, and in a text without documents a line end
    or what else the manifest says.
    """
    bos = first_token(tokenizer) if data is None or data.get("layout") == "bos text" else None
    before = [] if bos is None else [bos]
    if not text:
        return list(data["start"]) if data and "start" in data else before or [tokenizer.eos_token_id]
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"the prompt {text[:60]!r} is not UTF-8 text", "Type it again.") from None
    try:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        known = tokenizer.unk_token_id not in ids or tokenizer.unk_token in text
    except Exception:  # a tokenizer of characters without a token for others raises its own
        known = False
    if not known:
        raise _unseen(tokenizer, text)
    return before + list(ids)


def _unseen(tokenizer: PreTrainedTokenizerFast, text: str) -> UsageError:
    """What of a text the vocabulary does not have."""
    vocabulary = tokenizer.get_vocab()
    characters = sorted(token for token in vocabulary if len(token) == 1)
    if len(characters) + len(tokenizer.all_special_tokens) < len(vocabulary):
        return UsageError(
            f"the tokenizer does not know every word of {text[:60]!r}",
            f"Use words of its vocabulary of {len(vocabulary):,} tokens.",
        )
    missing = ", ".join(repr(character) for character in dict.fromkeys(text) if character not in vocabulary)
    return UsageError(
        f"the tokenizer does not know {missing}: it has the characters of its training text alone",
        f"Use these {len(characters)}: {''.join(characters[:200])!r}{' ...' if characters[200:] else ''}",
    )


def encoder(tokenizer: PreTrainedTokenizerFast, name: str = "") -> Encode:
    """The fastest way to encode much text, without special tokens: what looks like one in a text is text.
    `bytes` and `chars` need no more than a table."""
    if name == "bytes":
        return _encode_bytes
    if name == "chars":
        return _char_encoder(tokenizer)
    backend = tokenizer.backend_tokenizer

    def run(texts: list[str], places: bool) -> list[Any]:
        backend.encode_special_tokens = True  # other uses of the tokenizer set it back
        backend.no_truncation()
        try:
            encoded = backend.encode_batch if places else backend.encode_batch_fast
            return list(encoded(texts, add_special_tokens=False))
        except Exception as error:  # what the Rust library raises, as for a character that it does not know
            raise UsageError(
                f"the tokenizer cannot encode the text: {error}", f"Use another, such as {', '.join(OWN)}."
            ) from None

    def encode(texts: list[str], places: bool) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        word = texts[0].split()[:1] or [""]
        one, two = run([*word, " ".join(word * 2)], False)
        adds_space = one.ids * 2 == two.ids  # before every text, and so before every piece of one
        skipped = [adds_space and text.startswith(" ") for text in texts]
        found = run([text[skip:] for text, skip in zip(texts, skipped, strict=True)], places)
        for one, skip in zip(found, skipped, strict=True):
            ids = np.asarray(one.ids, np.int64)
            ends = np.fromiter((end for _, end in one.offsets), np.int64, len(ids)) if places else None
            yield ids, None if ends is None else np.maximum.accumulate(ends) + skip

    return encode


def _wrapped(backend: Tokenizer, unknown: str | None = None) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=SEPARATOR,
        unk_token=unknown,
        clean_up_tokenization_spaces=False,
    )


def _bytes() -> Tokenizer:
    """Token b is byte b; 256 is the end of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {sign: byte for byte, sign in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([SEPARATOR])
    return tokenizer


def _encode_bytes(texts: list[str], places: bool) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    for text in texts:
        ids = np.frombuffer(text.encode(), np.uint8)
        yield ids, np.cumsum(ids & 0xC0 != 0x80) if places else None  # a character's first byte


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


def _char_encoder(tokenizer: PreTrainedTokenizerFast) -> Encode:
    characters = sorted(token for token in tokenizer.get_vocab() if len(token) == 1)
    points = np.array([ord(character) for character in characters], np.uint32)
    table = np.full(0x110000, len(characters) + 1, np.uint32)  # UNKNOWN comes after the end of text
    table[points] = np.arange(len(points), dtype=np.uint32)

    def encode(texts: list[str], places: bool) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        for text in texts:
            ids = table[np.frombuffer(text.encode("utf-32-le"), "<u4")]
            yield ids, np.arange(1, len(ids) + 1) if places else None

    return encode


def _bpe(size: int, texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE with up to `size` tokens; fewer when the text has no more pairs to merge."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _words(marks_apart: bool, texts: Iterable[str]) -> Tokenizer:
    """The words of the training text by how often they come; then OTHER is for those that are not there."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordLevel({}, unk_token=OTHER))
    if marks_apart:
        tokenizer.normalizer = normalizers.Lowercase()
    word = r"\w+(?:'\w+)?|[^\w\s]" if marks_apart else r"\S+"
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(word), "removed", invert=True)
    trainer = trainers.WordLevelTrainer(
        vocab_size=MOST_WORDS if marks_apart else LARGEST_BPE,
        min_frequency=2 if marks_apart else 1,
        special_tokens=[SEPARATOR, OTHER],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
