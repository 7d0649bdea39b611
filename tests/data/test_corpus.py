"""What a corpus knows of its documents, of the text behind its tokens, and of other corpora."""

import itertools
import json
import shutil
from contextlib import nullcontext

import llama_like
import pytest
import torch

from langevin.data import prepare
from langevin.data.corpus import same_data
from langevin.data.tokenizers import encode_prompt

STORIES = [
    f"Story {i}: the <s> cat saw é 東 {i} birds, </s>  twice.\nThen 🦊 <|unknown|>" for i in range(40)
]
SPLITS = {"train": STORIES[:30], "valid": STORIES[30:35], "test": STORIES[35:]}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LANGEVIN_DATA", raising=False)


def write(folder, splits, separator="\n<|endoftext|>\n"):
    folder.mkdir(exist_ok=True)
    for split, texts in splits.items():
        (folder / f"{split}.txt").write_text(separator.join(texts), encoding="utf-8")
    return str(folder)


@pytest.fixture
def llama(tmp_path):
    return llama_like.save(tmp_path / "llama", STORIES)


@pytest.fixture
def bos_corpus(tmp_path, llama):
    return prepare(write(tmp_path / "texts", SPLITS), llama)


def test_a_tokenizer_that_begins_texts_with_bos_begins_documents_with_it(bos_corpus):
    """Training sees what prompts get, and what looks like a special token in a text is text."""
    bos = bos_corpus.tokenizer.bos_token_id
    assert bos_corpus.separator == bos == 1
    for split, stories in SPLITS.items():
        starts = [*bos_corpus.documents(split), len(bos_corpus.tokens(split))]
        rows = [bos_corpus.tokens(split)[a:b].tolist() for a, b in itertools.pairwise(starts)]
        assert len(rows) == len(stories)
        for row, story in zip(rows, stories, strict=True):
            assert row.count(bos) == 1
            assert bos_corpus.tokenizer.decode(row[1:]) == story
        plain = "Then the cat saw."
        assert encode_prompt(bos_corpus.tokenizer, plain, bos_corpus.manifest)[0] == bos
        assert encode_prompt(bos_corpus.tokenizer, plain) == bos_corpus.tokenizer(plain).input_ids


def test_a_bos_is_the_first_token_of_its_document_and_no_target(bos_corpus):
    tokens = torch.tensor([[7, 8, 1, 9, 10, 1, 1, 5]])
    assert bos_corpus.position_ids(tokens).tolist() == [[0, 1, 0, 1, 2, 0, 0, 1]]
    counts = bos_corpus.scored(tokens[:, 1:])
    assert counts.tolist() == [[True, False, True, True, False, False, True]]


def test_a_long_text_in_pieces_has_the_tokens_of_the_whole(tmp_path, llama, monkeypatch):
    """Also where the tokenizer puts a space before every text it is given."""
    text = "".join(f"Story {i}: the cat saw {i} birds.\n" for i in range(2000))
    folder = write(tmp_path / "long", {"train": [text], "valid": [text], "test": [text]})
    monkeypatch.setattr("langevin.data.texts.chunks.__defaults__", (1000,))
    corpus = prepare(folder, llama)
    assert corpus.manifest["layout"] == "text"
    assert corpus.tokens("test").tolist() == corpus.tokenizer(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("documents", [True, False], ids=["documents", "one text"])
@pytest.mark.parametrize("tokenizer", ["bytes", "chars", "bpe-300", "llama"])
def test_the_text_behind_the_first_tokens_is_counted_exactly(tmp_path, llama, tokenizer, documents):
    """Unknown characters count, separators do not, and a character counts with its first token."""
    splits = SPLITS | {"train": ["abc Story <s>"] * 30}  # the rest has characters that train does not have
    folder = write(tmp_path / "texts", splits, *([] if documents else [" "]))
    with pytest.warns(UserWarning, match="train does not have") if tokenizer == "chars" else nullcontext():
        corpus = prepare(folder, llama if tokenizer == "llama" else tokenizer)
    text = "".join(splits["test"]) if documents else " ".join(splits["test"])
    ids, facts = corpus.tokens("test"), corpus.manifest["splits"]["test"]
    assert (
        corpus.text_size("test") == (len(text), len(text.encode())) == (facts["characters"], facts["bytes"])
    )
    sizes = [corpus.text_size("test", 0, n) for n in range(len(ids) + 1)]
    assert sizes == sorted(sizes)
    for n, (characters, utf8_bytes) in enumerate(sizes):
        assert utf8_bytes == len(text[:characters].encode())
        assert corpus.text_size("test", 3, n) == (
            (characters - sizes[3][0], utf8_bytes - sizes[3][1]) if n > 3 else (0, 0)
        )
        if tokenizer != "chars":  # which cannot decode what is unknown
            known = [token for token in ids[:n].tolist() if token != corpus.separator]
            decoded = corpus.tokenizer.decode(known, skip_special_tokens=False)
            if "�" not in decoded and not (tokenizer == "llama" and documents):
                assert text[:characters] == decoded
        elif not documents:
            assert characters == n


def test_repeated_documents_are_told_each_time(tmp_path):
    folder = write(tmp_path / "texts", SPLITS | {"test": [*STORIES[35:], STORIES[3], STORIES[4]]})
    for _ in ("built", "opened again"):
        with pytest.warns(UserWarning, match="2 of 7 test documents stand word for word in train") as told:
            corpus = prepare(folder, "bytes")
        assert len(told) == 1
    assert corpus.manifest["repeated"] == {"train": 0, "valid": 0, "test": 2}


@pytest.mark.parametrize(
    ("text", "start"),
    [("one line\nthen another\n" * 40, "\n"), ("no lines here " * 40, " "), ("xyz" * 200, "x")],
)
def test_an_empty_prompt_of_a_text_without_documents_is_something_it_has(tmp_path, text, start):
    (tmp_path / "a.txt").write_text(text)
    corpus = prepare(str(tmp_path / "a.txt"), "bytes")
    assert encode_prompt(corpus.tokenizer, "", corpus.manifest) == [ord(start)]


def test_an_empty_prompt_is_what_a_document_follows(tmp_path, bos_corpus):
    assert encode_prompt(bos_corpus.tokenizer, "", bos_corpus.manifest) == [bos_corpus.separator]
    corpus = prepare(write(tmp_path / "texts", SPLITS), "bytes")
    assert encode_prompt(corpus.tokenizer, "", corpus.manifest) == [corpus.separator] == [256]
    assert encode_prompt(corpus.tokenizer, "ab", corpus.manifest) == [97, 98]


def test_moved_data_are_the_same_and_changed_data_are_named(tmp_path, llama):
    folder = write(tmp_path / "texts", SPLITS)
    here = prepare(folder, "bpe-300").manifest
    assert here["path"] == str((tmp_path / "texts").resolve())
    shutil.move(folder, tmp_path / "moved")
    there = prepare(str(tmp_path / "moved"), "bpe-300").manifest
    assert there["path"] == str((tmp_path / "moved").resolve())
    recorded = json.loads(json.dumps(here))
    assert same_data(recorded, there) is None
    write(tmp_path / "moved", {"valid": ["another"]})
    assert same_data(recorded, prepare(str(tmp_path / "moved"), "bpe-300").manifest) == "the valid text"
    write(tmp_path / "moved", SPLITS)
    assert same_data(recorded, prepare(str(tmp_path / "moved"), "bpe-301").manifest) == "the tokenizer"
    assert same_data(recorded, {}) == "the record of the data (it is damaged)"
    assert same_data([1], there) == "the record of the data (it is damaged)"
    before = {key: value for key, value in here.items() if key not in ("layout", "separator", "start")}
    assert same_data(before, there) is None  # what version 0.1 wrote
    assert same_data(before | {"layout": "bos text"}, there) == "what stands between documents"


def test_a_path_by_another_name_is_the_same_path(tmp_path, monkeypatch):
    write(tmp_path / "texts", SPLITS)
    (tmp_path / "link").symlink_to(tmp_path / "texts")
    monkeypatch.chdir(tmp_path)
    paths = {prepare(name, "bytes").manifest["path"] for name in ("texts", "link", "./texts/../texts")}
    assert paths == {str((tmp_path / "texts").resolve())}
