"""Where texts are found, how they are split, and what is said when something is wrong with them."""

import os
from pathlib import Path
from typing import ClassVar

import pytest

from langevin.data import hub, images, labelled, names, prepare
from langevin.data import texts as texts_module
from langevin.data.sources import GENERATED, NAMED, find
from langevin.data.texts import SPLITS, Texts, cut_by_position, split_documents
from langevin.errors import UsageError

DATA = Path(os.environ["LANGEVIN_DATA"]) if os.environ.get("LANGEVIN_DATA") else None


@pytest.fixture(autouse=True)
def _own_places(tmp_path, monkeypatch):
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LANGEVIN_DATA", str(tmp_path / "data"))


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode())


def test_missing_data_names_the_file_and_how_to_get_it(monkeypatch):
    monkeypatch.setattr(hub, "has_datasets", lambda: False)
    with pytest.raises(UsageError) as error:
        prepare("wikitext-2")
    assert "data/wikitext-2/wiki.train.tokens" in error.value.cause
    assert "pip install 'langevin[data]'" in error.value.remedy
    assert "LANGEVIN_DATA" in error.value.remedy
    monkeypatch.delenv("LANGEVIN_DATA")
    with pytest.raises(UsageError, match="LANGEVIN_DATA is not set"):
        prepare("wikitext-2")


def test_missing_data_without_network_say_so(monkeypatch):
    monkeypatch.setattr(hub, "has_datasets", lambda: True)
    monkeypatch.setattr(hub, "reachable", lambda: False)
    with pytest.raises(UsageError, match="Hub cannot be reached"):
        prepare("text8")


def test_a_set_that_is_nowhere_else_asks_for_langevin_data():
    with pytest.raises(UsageError, match="set LANGEVIN_DATA"):
        prepare("sampled-stories")


def test_a_set_with_a_file_missing_is_not_complete(tmp_path):
    write(tmp_path / "data" / "tinystories", {"train.txt": "a"})
    with pytest.raises(UsageError, match=r"no file .*tinystories/test\.txt"):
        prepare("tinystories")


@pytest.mark.parametrize(
    ("typed", "meant"), [("storis", "stories"), ("wikitext2", "wikitext-2"), ("text-8", "text8")]
)
def test_an_unknown_name_suggests_the_nearest(typed, meant):
    with pytest.raises(UsageError, match=f"Did you mean '{meant}'"):
        prepare(typed)


@pytest.mark.parametrize("name", ["no/such/file", "missing.txt"])
def test_a_path_that_does_not_exist_is_named(name):
    with pytest.raises(UsageError, match=f"no such file or folder: {name}"):
        prepare(name)


@pytest.mark.parametrize("content", [b"", b"  \n\n ", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(tmp_path, content):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(UsageError, match=r"a\.txt is empty"):
        prepare(str(tmp_path / "a.txt"))


def test_bytes_that_are_not_text_are_refused_with_their_place(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 au lait" * 100)
    with pytest.raises(UsageError, match=r"a\.txt is not UTF-8 text: byte 0xe9 at offset 3"):
        prepare(str(tmp_path / "a.txt"))


def test_a_folder_without_text_files_is_refused(tmp_path):
    (tmp_path / "picture.png").write_bytes(b"x")
    with pytest.raises(UsageError, match="no text files in"):
        prepare(str(tmp_path))


def test_a_text_too_short_to_split_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("ab")
    with pytest.raises(UsageError, match="too short"):
        prepare(str(tmp_path / "a.txt"), "bytes")


def read(name, **settings):
    """The texts of a source, with lists for streams; a text without documents is one piece."""
    texts = find(str(name), settings).read()
    splits = {split: list(stream()) for split, stream in texts.splits.items()}
    if not texts.documents:
        splits = {split: ["".join(blocks)] for split, blocks in splits.items()}
    return Texts(splits, texts.documents, texts.facts)


def test_a_file_is_cut_at_line_ends_and_nothing_is_lost(tmp_path):
    text = "".join(f"line {i}\r\n" for i in range(1000))
    write(tmp_path, {"a.txt": text})
    texts = read(tmp_path / "a.txt")
    assert not texts.documents
    assert "".join(texts.splits[split][0] for split in SPLITS) == text
    assert all(texts.splits[split][0].endswith("\r\n") for split in SPLITS)


def test_separators_make_documents_and_documents_are_not_cut(tmp_path):
    documents = [f"Document {i:03}.\nIts second line." for i in range(100)]
    write(tmp_path, {"a.txt": "\n<|endoftext|>\n".join(documents)})
    texts = read(tmp_path / "a.txt")
    assert texts.documents
    assert [d for split in SPLITS for d in texts.splits[split]] == documents
    assert [len(texts.splits[split]) for split in SPLITS] == [90, 5, 5]


def test_files_of_a_folder_are_documents_in_order_of_their_names(tmp_path):
    write(tmp_path / "books", {f"{i:02}.txt": f"Book {i}." for i in range(40)} | {"sub/x.md": "Last."})
    texts = read(tmp_path / "books", valid=0.1, test=0.1)
    assert texts.documents
    assert texts.splits["train"][0] == "Book 0."
    assert texts.splits["test"][-1] == "Last."


def test_a_folder_that_is_split_already_stays_so(tmp_path):
    write(tmp_path / "mine", {f"{split}.txt": f"{split} text" for split in SPLITS})
    assert read(tmp_path / "mine").splits == {split: [f"{split} text"] for split in SPLITS}


def test_few_documents_are_cut_inside():
    splits, border = cut_by_position(lambda: ["a\n" * 100], True, (0.9, 0.95))
    assert [[len(part) for part in splits[split]()] for split in SPLITS] == [[180], [10], [10]]
    assert border == "lines"


@pytest.mark.parametrize("size", [1, 7, 64, 4096])
def test_texts_are_the_same_whatever_the_blocks_they_are_read_in(tmp_path, monkeypatch, size):
    """Separators, line ends, byte order marks and characters of several bytes fall across blocks."""
    documents = [f"Número {i}.\n\n <|endo 東京 🦊" for i in range(30)]
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(documents), encoding="utf-8-sig")
    (tmp_path / "b.txt").write_text("αβγ δε\n" * 200, encoding="utf-8-sig")
    whole = [read(tmp_path / name) for name in ("a.txt", "b.txt")]
    monkeypatch.setattr(texts_module, "BLOCK", size)
    assert [read(tmp_path / name) for name in ("a.txt", "b.txt")] == whole
    assert [d for split in SPLITS for d in whole[0].splits[split]] == documents
    assert "".join(whole[1].splits[split][0] for split in SPLITS) == "αβγ δε\n" * 200


def test_the_place_of_a_wrong_byte_is_counted_from_the_start_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(texts_module, "BLOCK", 16)
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + "é".encode() * 50 + b"\xe9 x")
    with pytest.raises(UsageError, match="byte 0xe9 at offset 103"):
        prepare(str(tmp_path / "a.txt"), "bytes")


def test_a_document_may_be_longer_than_a_block():
    blocks = ["ab<|endofte", "xt|>c", "d" * 50, "e<|", "endoftext|>", " <|endoftext|>", "f"]
    assert list(split_documents(blocks)) == ["ab", "c" + "d" * 50 + "e", "f"]


def test_text8_prefixes_are_split_in_proportion(tmp_path):
    write(tmp_path / "data" / "text8", {"text8": "abcdefghi " * 100})
    texts = read("text8")
    assert [len(texts.splits[split][0]) for split in SPLITS] == [900, 50, 50]
    assert texts.facts["comparable"] == "no: the first 1,000 of 100,000,000 characters"


def test_tinystories_takes_validation_from_the_end_of_train(tmp_path):
    train = "".join(f"Story {i}.\n<|endoftext|>\n" for i in range(100))
    write(tmp_path / "data" / "tinystories", {"train.txt": train, "test.txt": "The test.\n<|endoftext|>\n"})
    texts = read("tinystories")
    assert texts.splits["valid"] == [f"Story {i}." for i in range(95, 100)]
    assert (len(texts.splits["train"]), texts.splits["test"]) == (95, ["The test."])


def test_a_file_that_is_not_the_usual_one_is_warned_of(tmp_path):
    write(tmp_path / "data" / "tinyshakespeare", {"input.txt": "not Shakespeare " * 10})
    with pytest.warns(UserWarning, match="not the usual file"):
        find("tinyshakespeare", {})


class Datasets:
    """Stands in for the `datasets` library: rows as the Hub has them."""

    rows: ClassVar = {
        "train": ["", " = Title = \n", " A line . \n"],
        "validation": ["", " v \n"],
        "test": [" t \n"],
    }

    @classmethod
    def load_dataset(cls, repository, config, split, revision):
        assert (repository, config) == ("Salesforce/wikitext", "wikitext-103-v1")
        return [{"text": text} for text in cls.rows[split]]


def test_what_the_hub_has_is_fetched_once_and_written_as_the_original_files(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "has_datasets", lambda: True)
    monkeypatch.setattr(hub, "reachable", lambda: True)
    monkeypatch.setattr(hub, "import_module", lambda name: Datasets)
    assert read("wikitext-103").splits["train"] == [" \n = Title = \n A line . \n"]
    monkeypatch.setattr(hub, "import_module", lambda name: pytest.fail("fetched again"))
    assert read("wikitext-103").splits["test"] == [" t \n"]
    folders = [p.name for p in (tmp_path / "cache" / "sources").iterdir() if p.is_dir()]
    assert folders == ["wikitext-103"]


def test_a_fetch_that_fails_leaves_nothing(tmp_path, monkeypatch):
    class Broken:
        @staticmethod
        def load_dataset(*arguments, split, **options):
            if split == "test":
                raise ConnectionError("the line went dead")
            return [{"text": "a"}]

    monkeypatch.setattr(hub, "has_datasets", lambda: True)
    monkeypatch.setattr(hub, "reachable", lambda: True)
    monkeypatch.setattr(hub, "import_module", lambda name: Broken)
    with pytest.raises(UsageError, match="the line went dead"):
        prepare("wikitext-103")
    assert not (tmp_path / "cache" / "sources").exists()


def test_names_says_what_is_here(tmp_path):
    write(tmp_path / "data" / "tinystories", {"train.txt": "abc", "test.txt": "de"})
    rows = {row["name"]: row for row in names()}
    assert set(rows) == {*GENERATED, *NAMED, *labelled.GENERATED, *labelled.NAMED, *images.ABOUT}
    assert rows["imdb"]["here"] is False
    assert (rows["stories"]["here"], rows["stories"]["kind"]) == (True, "generated")
    assert (rows["tinystories"]["here"], rows["tinystories"]["bytes"]) == (True, 5)
    assert (rows["wikitext-2"]["here"], rows["wikitext-2"]["bytes"]) == (False, None)


REAL = {
    "tinyshakespeare": {"train": 1003854, "valid": 55770, "test": 55770},
    "wikitext-2": {"train": 10780437, "valid": 1120192, "test": 1255018},
    "text8": {"train": 66000000, "valid": 4000000, "test": 4090640},
}


@pytest.mark.parametrize("name", REAL)
def test_real_texts_have_their_usual_sizes(name, monkeypatch):
    if DATA is None or not (DATA / name).is_dir():
        pytest.skip(f"LANGEVIN_DATA has no {name}")
    if name == "text8" and (DATA / "text8" / "text8").stat().st_size != 74_090_640:
        pytest.skip("text8 is another prefix")
    monkeypatch.setenv("LANGEVIN_DATA", str(DATA))
    texts = read(name)
    assert {split: len(text) for split, (text,) in texts.splits.items()} == REAL[name]


def test_real_shakespeare_has_65_characters_and_reads_back(monkeypatch):
    if DATA is None or not (DATA / "tinyshakespeare").is_dir():
        pytest.skip("LANGEVIN_DATA has no tinyshakespeare")
    monkeypatch.setenv("LANGEVIN_DATA", str(DATA))
    corpus = prepare("tinyshakespeare")
    assert corpus.vocab_size == 66
    text = (DATA / "tinyshakespeare" / "input.txt").read_text()
    assert "".join(corpus.tokenizer.decode(corpus.tokens(split)) for split in SPLITS) == text
