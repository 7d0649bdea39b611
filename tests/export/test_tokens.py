"""Tokens of exported classifiers: with and without the library tokenizers, a text has the same."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from langevin.data.tokenizers import make
from langevin.errors import UsageError
from langevin.export import tokens

TEXTS = [
    "It's a fine, warm film!  They'd see_it\ttwice\n\n in 1999 \u00bd ... 'quoted' O'Neil's x²",
    "Naïve CAFÉ — “straße” Łódź’s €5…",
    "",
    "<|endoftext|> dull <|other|>",
    "e\u0301té İstanbul Σίσυφος क्ष 你好，世界 😀👨\u200d👩\u200d👧 \x1c \u2028 \u00a0 end",
]

OTHERS = [*range(0x20, 0x80), *range(0x300, 0x500), *range(0x900, 0x980), *range(0x1F600, 0x1F640)]


def stored(name: str, texts: list[str] = TEXTS) -> bytes:
    content: str = make(name, texts * 2, texts).backend_tokenizer.to_str()
    return content.encode()


@pytest.mark.parametrize("name", ["words", "spaces", "chars", "bytes", "bpe-300"])
def test_a_text_has_the_tokens_of_the_library(name: str) -> None:
    file = stored(name)
    ours, library = tokens.encoder(file), tokens._library(file)
    assert [ours([text]) for text in TEXTS] == [library([text]) for text in TEXTS]
    assert ours(TEXTS) == library(TEXTS)


@pytest.mark.parametrize("name", ["words", "spaces"])
def test_every_character_that_is_read_without_the_library_is_read_alike(name: str) -> None:
    characters = [chr(c) for c in range(0x110000) if tokens.ALIKE.fullmatch(chr(c))]
    draw = random.Random(0)
    texts = [f"a{c}b {c} {c}{c}'{c} A{c}" for c in characters]
    texts += ["".join(draw.choices(characters, k=40)) for _ in range(500)]
    texts += ["".join(draw.choices("ab'_ .\n", k=40)) for _ in range(500)]
    texts += ["".join(chr(draw.choice(OTHERS)) for _ in range(40)) for _ in range(500)]
    file = stored(name, texts)
    assert tokens.encoder(file)(texts) == tokens._library(file)(texts)


@pytest.mark.parametrize("name", ["words", "spaces"])
def test_words_are_read_without_the_library(name: str, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(stored(name))
    code = """
import sys
from pathlib import Path
from langevin.export.tokens import encoder
encode = encoder(Path(sys.argv[1]).read_bytes())
assert encode(["It's a warm café… “fine”"])
assert "tokenizers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(file)], check=True)


def test_a_text_that_is_no_unicode_is_refused() -> None:
    for name in ("words", "bytes"):
        with pytest.raises(UsageError, match="cannot encode the text"):
            tokens.encoder(stored(name))(["a \ud800"])
