"""Tokenizers made here: exact round trips, eos, saving, and the fast encoders."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from langevin.data import tokenizers
from langevin.data.texts import SEPARATOR, chunks
from langevin.errors import UsageError

TEXT = (
    'Once upon a time, there was a fox.\n\nIt said: "No!"  \t Twice.\r\nNaïve façade, 東京, emoji 🦊👩‍🚀, '
    "zero\x00byte, 12,345.67 <b>tags</b> 'tis don't  trailing \n"
)
NAMES = ["bytes", "chars", "bpe-300"]


def made(name, text=TEXT, others=()):
    tokenizer = tokenizers.make(name, [text], others)
    return SimpleNamespace(tokenizer=tokenizer, encode=tokenizers.encoder(tokenizer, name))


@pytest.mark.parametrize("name", NAMES)
def test_text_survives_the_round_trip(name):
    tokenizer = made(name).tokenizer
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


@pytest.mark.parametrize("name", ["bytes", "bpe-300"])
def test_byte_level_tokenizers_take_text_they_have_never_seen(name):
    tokenizer = made(name, "abc").tokenizer
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


@pytest.mark.parametrize("name", NAMES)
def test_the_saved_tokenizer_loads_with_autotokenizer_and_means_the_same(name, tmp_path):
    tokenizer = made(name).tokenizer
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.encode(TEXT) == tokenizer.encode(TEXT)
    assert loaded.decode(loaded.encode(TEXT)) == TEXT
    assert (loaded.eos_token, loaded.eos_token_id) == (SEPARATOR, tokenizer.eos_token_id)
    assert len(loaded) == len(tokenizer)


@pytest.mark.parametrize("name", NAMES)
def test_the_encoder_gives_the_ids_of_the_tokenizer(name):
    it = made(name)
    ((ids, _),) = it.encode([TEXT], False)
    assert ids.tolist() == it.tokenizer.encode(TEXT)


@pytest.mark.parametrize("name", NAMES)
def test_the_end_of_text_is_one_token_of_its_own(name):
    tokenizer = made(name).tokenizer
    assert tokenizer.encode(f"a{SEPARATOR}") == [*tokenizer.encode("a"), tokenizer.eos_token_id]


def test_bytes_are_their_own_ids():
    tokenizer = made("bytes").tokenizer
    assert len(tokenizer) == 257
    assert tokenizer.encode("é\n") == list("é\n".encode())
    assert tokenizer.eos_token_id == 256


def test_chars_are_sorted_by_code_point_and_eos_comes_next():
    tokenizer = made("chars", "cab b").tokenizer
    assert tokenizer.convert_ids_to_tokens(range(5)) == [" ", "a", "b", "c", SEPARATOR]
    assert len(tokenizer) == 5


def test_characters_that_train_does_not_have_become_an_explicit_token():
    it = made("chars", "abc", ["abcd é"])
    ((ids, _),) = it.encode(["adé"], False)
    assert it.tokenizer.unk_token == tokenizers.UNKNOWN
    assert it.tokenizer.convert_ids_to_tokens(ids.tolist()) == ["a", tokenizers.UNKNOWN, tokenizers.UNKNOWN]
    assert it.tokenizer.encode("adé") == ids.tolist()


def test_a_language_model_of_characters_has_no_token_that_no_split_needs():
    assert made("chars", "abc", ["cab"]).tokenizer.unk_token is None


def test_bpe_is_the_same_when_trained_again():
    text = TEXT * 3 + "the cat sat on the mat. " * 20
    assert made("bpe-320", text).tokenizer.get_vocab() == made("bpe-320", text).tokenizer.get_vocab()


def test_bpe_has_as_many_tokens_as_its_name_says_where_the_text_allows():
    text = " ".join(f"word{i} other{i * 7}" for i in range(500))
    assert len(made("bpe-400", text).tokenizer) == 400


def test_a_bpe_with_too_few_tokens_is_refused():
    with pytest.raises(UsageError, match="bpe-100 is too small"):
        tokenizers.is_made_here("bpe-100")


def test_an_unknown_tokenizer_suggests_one(monkeypatch):
    monkeypatch.setattr(tokenizers, "reachable", lambda: False)
    with pytest.raises(UsageError, match="Did you mean 'chars'"):
        tokenizers.load("char")


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(UsageError, match=str(tmp_path)):
        tokenizers.load(str(tmp_path))


def test_a_saved_tokenizer_is_loaded_from_its_folder_or_from_langevin_data(tmp_path, monkeypatch):
    made("bytes").tokenizer.save_pretrained(tmp_path / "models" / "mine-tokenizer")
    monkeypatch.setenv("LANGEVIN_DATA", str(tmp_path))
    by_name, by_folder = (
        tokenizers.load("mine"),
        tokenizers.load(str(tmp_path / "models" / "mine-tokenizer")),
    )
    assert tokenizers.fingerprint(by_name) == tokenizers.fingerprint(by_folder)


def test_a_tokenizer_without_an_end_of_text_is_refused(tmp_path):
    tokenizer = made("bytes").tokenizer
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="no end-of-text token"):
        tokenizers.load(str(tmp_path))


@pytest.mark.parametrize("text", ["word " * 5000, "line\n" * 5000, "x" * 30000, "a  b \n\n c" * 3000])
def test_pieces_of_a_long_text_join_to_the_text(text):
    pieces = list(chunks([text[:700], text[700:]], size=1000))
    assert "".join(pieces) == text
    assert len(pieces) > 5
    assert max(map(len, pieces)) <= 2000


def test_bpe_of_pieces_is_bpe_of_the_whole():
    text = (TEXT + "The 2nd cat, too; it's  here. ") * 40
    it = made("bpe-400", text)
    pieces = [id_ for piece in chunks([text], size=500) for id_ in it.tokenizer.encode(piece)]
    assert pieces == it.tokenizer.encode(text)


GPT2 = Path(os.environ.get("LANGEVIN_DATA", "")) / "models" / "gpt2-tokenizer"


@pytest.mark.skipif(not GPT2.is_dir(), reason="LANGEVIN_DATA has no models/gpt2-tokenizer")
def test_gpt2_is_found_by_name_and_gives_its_known_ids():
    tokenizer = tokenizers.load("gpt2")
    ((ids, _),) = tokenizers.encoder(tokenizer)(["Hello world"], False)
    assert np.array_equal(ids, [15496, 995])
    assert (len(tokenizer), tokenizer.eos_token_id) == (50257, 50256)


@pytest.mark.parametrize("name", ["bpe-99999999999999999999", "bpe-4000000000", "bpe-" + "9" * 5000])
def test_a_bpe_with_too_many_tokens_is_refused(name):
    with pytest.raises(UsageError, match="is too large"):
        tokenizers.is_made_here(name)


@pytest.mark.parametrize("others", [(), ("é",)], ids=["without unknown", "with unknown"])
def test_a_prompt_with_characters_that_training_never_saw_is_refused_by_their_name(others):
    tokenizer = made("chars", "abc \n", others).tokenizer
    with pytest.raises(UsageError, match="does not know 'é', 'X'") as error:
        tokenizers.encode_prompt(tokenizer, "aéXa")
    assert repr("\n abc") in error.value.remedy
    assert tokenizers.encode_prompt(tokenizer, "cab") == tokenizer.encode("cab")


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_that_is_not_text_is_refused(name):
    with pytest.raises(UsageError, match="not UTF-8 text"):
        tokenizers.encode_prompt(made(name).tokenizer, "a\udce9")


def test_a_tokenizer_with_gaps_needs_room_for_its_largest_id(tmp_path):
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 7, SEPARATOR: 20}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SEPARATOR)
    assert len(tokenizer) == 3
    assert tokenizers.vocabulary(tokenizer) == 21


def test_a_tokenizer_that_would_cut_texts_short_does_not(tmp_path):
    tokenizer = made("bpe-300").tokenizer
    tokenizer.backend_tokenizer.enable_truncation(4)
    ((ids, _),) = tokenizers.encoder(tokenizer)([TEXT], False)
    assert tokenizer.decode(ids.tolist()) == TEXT


def test_a_text_that_a_loaded_tokenizer_cannot_encode_is_refused():
    encode = tokenizers.encoder(made("chars", "abc").tokenizer)
    with pytest.raises(UsageError, match="cannot encode the text"):
        list(encode(["abcd"], False))


CONFIG, TOKENS = "tokenizer_config.json", "tokenizer.json"


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        (TOKENS, None),
        (TOKENS, lambda sound: "{}"),
        (TOKENS, lambda sound: sound[: len(sound) // 2]),
        (TOKENS, lambda sound: "[1]"),
        (TOKENS, lambda sound: "[" * 20_000),
        (CONFIG, lambda sound: "[1]"),
        (CONFIG, lambda sound: '{"a'),
        (CONFIG, lambda sound: "{}"),
        (CONFIG, lambda sound: sound.replace('"eos_token": ', '"eos_token": 5, "was": ')),
        (CONFIG, lambda sound: sound.replace(SEPARATOR, "<nothing like it>")),
        (
            CONFIG,
            lambda sound: '{"auto_map": {"AutoTokenizer": ["code.Own", null]}, "tokenizer_class": "Own"}',
        ),
    ],
)
def test_a_damaged_tokenizer_is_one_line_of_cause_and_one_of_remedy(tmp_path, file, damage):
    made("bytes").tokenizer.save_pretrained(tmp_path)
    (tmp_path / "code.py").write_text("raise SystemExit('code of its own was run')")
    sound = (tmp_path / file).read_text()
    (tmp_path / file).unlink()
    if damage is not None:
        (tmp_path / file).write_text(damage(sound))
    with pytest.raises(UsageError) as error:
        tokenizers.load_tokenizer(tmp_path)
    assert str(tmp_path) in error.value.cause
    assert "\n" not in error.value.cause
    assert error.value.remedy


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "no such/name at all"])
def test_a_name_that_no_tokenizer_can_have_is_refused(name, monkeypatch):
    monkeypatch.setattr(tokenizers, "reachable", lambda: False)
    with pytest.raises(UsageError, match="unknown tokenizer"):
        tokenizers.load(name)
