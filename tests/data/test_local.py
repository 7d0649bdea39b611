"""Local texts: named splits or a cut, never a switch between them that nobody is told of."""

import warnings

import pytest

from langevin.data import prepare
from langevin.errors import UsageError

WORDS = {"train": "apple", "valid": "berry", "test": "cherry"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LANGEVIN_DATA", raising=False)


def folder_of(tmp_path, files):
    """Each file tells its split by its words."""
    folder = tmp_path / "mine"
    for name, word in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{word} pie and {word} jam\n" * 30)
    return folder


def words_of(corpus):
    text = {split: corpus.tokenizer.decode(corpus.tokens(split)) for split in WORDS}
    return {split: {word for word in (*WORDS.values(), "read") if word in text[split]} for split in WORDS}


def named(train, valid, test):
    return {train: "apple", valid: "berry", test: "cherry"}


@pytest.mark.parametrize(
    "files",
    [
        named("train.txt", "valid.txt", "test.txt"),
        named("train.txt", "val.txt", "test.txt"),
        named("train.md", "validation.md", "test.md"),
        named("Train.TXT", "Dev.TXT", "Test.TXT"),
        named("wiki.train.txt", "wiki.valid.txt", "wiki.test.txt"),
        named("en/stories_train.txt", "en/stories_dev.txt", "en/stories_test.txt"),
        named("train/a.txt", "valid/b.txt", "test/c.md"),
        named("train-00000-of-00002.txt", "val-00000-of-00001.txt", "test-00000-of-00001.txt")
        | {"train-00001-of-00002.txt": "apple"},
    ],
    ids=lambda files: "+".join(files),
)
@pytest.mark.parametrize(
    "extra", [{}, {"README.md": "read", "a/notes.txt": "read"}], ids=["alone", "extra"]
)
def test_named_splits_are_the_splits_and_other_files_are_left_out_loudly(tmp_path, files, extra):
    folder = folder_of(tmp_path, files | extra)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        corpus = prepare(str(folder), "bytes")
    assert words_of(corpus) == {split: {word} for split, word in WORDS.items()}
    said = [str(warning.message) for warning in told if "left out" in str(warning.message)]
    assert len(said) == len(extra) // 2
    assert all("README.md, a/notes.txt left out" in message for message in said)


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        (["train.txt", "test.txt"], "no valid"),
        (["train.txt", "README.md"], "no valid and no test"),
        (["test.csv", "notes.md"], "no train and no valid"),
        (["train.txt", "val.txt", "test.csv"], "no set of all three"),
        (["wiki.train.txt", "wiki.test.txt", "a.txt"], "no valid"),
        (["train/a.txt", "test/b.txt"], "no valid"),
        (["train.txt", "val.txt", "valid.txt", "test.txt"], "two names for one split"),
        (
            ["a/train.txt", "a/dev.txt", "a/test.txt", "b/train.txt", "b/dev.txt", "b/test.txt"],
            "several sets",
        ),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else None,
)
def test_a_folder_that_is_split_in_part_or_twice_is_refused(tmp_path, files, missing):
    folder = folder_of(tmp_path, dict.fromkeys(files, "apple"))
    with pytest.raises(UsageError, match=missing) as error:
        prepare(str(folder), "bytes")
    assert "\n" not in error.value.cause
    assert error.value.remedy


@pytest.mark.parametrize("names", [["latest-news.txt", "contest.txt"], ["how-to-test.txt", "trains.md"]])
def test_other_names_make_no_splits(tmp_path, names):
    folder = folder_of(tmp_path, dict.fromkeys(names, "apple"))
    assert prepare(str(folder), "bytes").manifest["facts"]["split"].startswith("by position")


def test_tables_and_texts_do_not_mix(tmp_path):
    folder = folder_of(tmp_path, {"data.csv": "apple", "README.md": "read"})
    with pytest.raises(UsageError, match=r"both tables \(data\.csv\) and texts \(README\.md\)"):
        prepare(str(folder), "bytes")


@pytest.mark.parametrize("name", ["", "x" * 300, "a\0b"])
def test_a_name_that_names_nothing_is_refused(name):
    with pytest.raises(UsageError, match=r"no data were named|unknown data"):
        prepare(name)


def test_a_tokenizer_without_a_name_is_refused():
    with pytest.raises(UsageError, match="the tokenizer has no name"):
        prepare("stories", "")
