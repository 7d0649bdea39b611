r"""Texts to tokens as a tokenizer.json says, in little memory.

The library tokenizers takes 14 MB for the 30,000 words of `words`. That tokenizer and `spaces` are no more
than a regular expression and a table of words, for which Python is enough: its \w, \s and small letters are
the library's as long as a text has Latin letters and the usual marks. Texts with other characters, and
other tokenizers, are left to the library.
"""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_left
from collections.abc import Callable
from functools import cache, lru_cache
from itertools import accumulate

from langevin.errors import UsageError, one_line

Encode = Callable[[list[str]], list[list[int]]]

ALIKE = re.compile("[^\x1c-\x1f\u0300-\u200f\u2028-\U0010ffff]*")  # characters that both see alike
PATTERNS = (r"\w+(?:'\w+)?|[^\w\s]", r"\S+")  # of `words` and `spaces`
KEPT = 4096  # words whose tokens are at hand


def encoder(stored: bytes) -> Encode:
    """Texts to tokens, without special ones: what looks like one in a text is text."""
    return _words(stored) or _library(stored)


def _library(stored: bytes) -> Encode:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(stored)
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(texts: list[str]) -> list[list[int]]:
        try:
            return [text.ids for text in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        except Exception as error:  # what the Rust library raises, as for a character that it does not know
            raise UsageError(f"the tokenizer cannot encode the text: {one_line(error)}") from None

    return encode


def _words(stored: bytes) -> Encode | None:
    """The same for a tokenizer of words; None if it is another."""
    if b'"WordLevel"' not in stored:
        return None
    told = json.loads(stored)
    splits = {"type": "Split", "behavior": "Removed", "invert": True}
    ours = [{**splits, "pattern": {"Regex": pattern}} for pattern in PATTERNS]
    special = all(token["special"] for token in told["added_tokens"])
    if (
        told["pre_tokenizer"] not in ours
        or told["normalizer"] not in (None, {"type": "Lowercase"})
        or not special
    ):
        return None
    pattern = re.compile(told["pre_tokenizer"]["pattern"]["Regex"])
    small = told["normalizer"] is not None
    token = _table(told["model"]["vocab"], told["model"]["unk_token"])
    library = cache(lambda: _library(stored))

    def encode(texts: list[str]) -> list[list[int]]:
        read = [text.lower() for text in texts] if small else texts
        if not all(map(ALIKE.fullmatch, read)):
            return library()(texts)
        return [[token(word) for word in pattern.findall(text)] for text in read]

    return encode


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
