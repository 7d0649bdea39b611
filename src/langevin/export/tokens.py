r"""Texts to tokens as a tokenizer.json says, in little memory.

The library tokenizers takes 14 MB for the 30,000 words of `words`. That tokenizer and `spaces` are no more
than a regular expression and a table of words, for which Python is enough: its \w, \s and small letters are
the library's for Latin letters and the usual marks. A text with other characters is taken apart by the
library, 6 MB, and its words are found in the same table. Other tokenizers are the library's.
"""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_left
from collections.abc import Callable
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

from langevin.errors import UsageError, one_line

Encode = Callable[[list[str]], list[list[int]]]

ALIKE = re.compile("[^\x1c-\x1f\u0300-\u200f\u2028-\U0010ffff]*")  # characters that both see alike
PATTERNS = (r"\w+(?:'\w+)?|[^\w\s]", r"\S+")  # of `words` and `spaces`
KEPT = 4096  # words whose tokens are at hand


def encoder(stored: bytes) -> Encode:
    """Texts to tokens, without special ones: what looks like one in a text is text."""
    tokens = _words(stored) or _library(stored)

    def encode(texts: list[str]) -> list[list[int]]:
        try:
            return tokens(texts)
        except Exception as error:  # what the Rust library raises, as for a character that it does not know
            raise UsageError(f"the tokenizer cannot encode the text: {one_line(error)}") from None

    return encode


def _library(stored: bytes) -> Encode:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(stored)
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda texts: [text.ids for text in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def _words(stored: bytes) -> Encode | None:
    """The same for a tokenizer of words; None if it is another."""
    if b'"WordLevel"' not in stored:
        return None
    told = json.loads(stored)
    splits = {"type": "Split", "behavior": "Removed", "invert": True}
    ours = [{**splits, "pattern": {"Regex": pattern}} for pattern in PATTERNS]
    if told["pre_tokenizer"] not in ours or told["normalizer"] not in (None, {"type": "Lowercase"}):
        return None
    if not all(token["special"] for token in told["added_tokens"]):
        return None
    split = _splitter(told["pre_tokenizer"]["pattern"]["Regex"], told["normalizer"] is not None)
    token = _table(told["model"]["vocab"], told["model"]["unk_token"])
    return lambda texts: [[token(word) for word in split(text)] for text in texts]


def _splitter(pattern: str, small: bool) -> Callable[[str], list[str]]:
    """The words of a text, in small letters if so."""
    find = re.compile(pattern).findall

    @cache
    def library() -> tuple[Any, Any]:
        from tokenizers import Regex, normalizers, pre_tokenizers

        return normalizers.Lowercase(), pre_tokenizers.Split(Regex(pattern), "removed", invert=True)

    def split(text: str) -> list[str]:
        read = text.lower() if small else text
        if ALIKE.fullmatch(read):
            return find(read)
        lower, splitter = library()
        read = lower.normalize_str(text) if small else text
        return [word for word, _ in splitter.pre_tokenize_str(read)]

    return split


def _table(vocabulary: dict[str, int], other: str) -> Callable[[str], int]:
    """The token of a word: in place of a dictionary, a tenth of its size, the words one behind another in
    order, where each begins, and its token."""
    words = sorted((word.encode(), token) for word, token in vocabulary.items())
    joined = b"".join(word for word, _ in words)
    starts = array("I", accumulate((len(word) for word, _ in words), initial=0))
    tokens = array("I", (token for _, token in words))
    places, unknown = range(len(tokens)), vocabulary[other]

    def word_at(place: int) -> bytes:
        return joined[starts[place] : starts[place + 1]]

    @lru_cache(KEPT)
    def token_of(word: str) -> int:
        sought = word.encode()
        place = bisect_left(places, sought, key=word_at)
        return tokens[place] if place < len(tokens) and word_at(place) == sought else unknown

    return token_of
