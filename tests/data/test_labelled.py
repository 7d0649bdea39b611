"""Texts with classes: how they are read, split and put into batches, and what is refused."""

from __future__ import annotations

import csv
import json
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from langevin import data
from langevin.data import hub, labelled, order, tables
from langevin.data.corpus import same_data
from langevin.data.examples import LabelledTexts, few_lengths
from langevin.data.synthetic.listops import LRA, NYU, ListOps
from langevin.data.tokenizers import UNKNOWN
from langevin.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:.*longer than the context")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LANGEVIN_DATA", raising=False)


def table(
    path: Path, rows: list[tuple[object, object]], names: tuple[str, str] = ("text", "label")
) -> Path:
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([names, *rows])
    return path


def numbered(count: int, classes: int = 3) -> list[tuple[object, object]]:
    return [(f"text {'so ' * (i % 17)}{i}", i % classes) for i in range(count)]


def test_a_table_with_quotes_emoji_empty_rows_and_a_row_of_60000_words(tmp_path: Path) -> None:
    rows = [
        *numbered(60),
        ('she said "no", 😀\nand left', 1),
        ("", 2),
        ("nobody's", ""),
        ("very " * 60_000, 0),
    ]
    path = table(tmp_path / "my.csv", rows, ("review", "stars"))
    with pytest.warns(UserWarning, match="left out: 1 rows without a (text|label)"):
        found = data.prepare_labelled(
            str(path), "words", context=16, text_column="review", label_column="stars"
        )
    assert sum(len(found.labels(split)) for split in ("train", "valid", "test")) == 62
    assert found.classes == ["0", "1", "2"]
    assert max(found.lengths) == 16
    texts = {text for split in ("valid", "test") for text in found.texts(split)}
    assert len(texts) == len(found.labels("valid")) + len(found.labels("test"))
    every = np.arange(len(found.labels("test")))
    arrays = found.rows("test", every)
    for row, text in enumerate(found.texts("test")):  # as the tokenizer itself reads them
        ids = arrays["input_ids"][row][arrays["attention_mask"][row]].tolist()
        assert ids == found.tokenizer(text, truncation=True).input_ids


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_formats_hold_the_same_rows(tmp_path: Path, suffix: str) -> None:
    rows, path = numbered(40), tmp_path / f"rows{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps({"text": t, "label": y}) + "\n" for t, y in rows))
    else:
        mark = tables.DELIMITERS[suffix]
        path.write_text("".join(f"{t}{mark}{y}\n" for t, y in [("text", "label"), *rows]))
    found = data.prepare_labelled(str(path), "bytes", context=64)
    assert sorted(map(len, (found.labels(s) for s in ("train", "valid", "test")))) == [3, 3, 34]


def test_rows_of_jsonl_without_a_text_or_a_label_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "my.jsonl"
    rows: list[dict[str, object]] = [{"text": t, "label": y} for t, y in numbered(60)]
    rows += [{"label": 1}, {"text": None, "label": 1}, {"text": "nobody's"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.warns(UserWarning, match="left out: . rows without a (text|label)"):
        found = data.prepare_labelled(str(path), "bytes", context=64)
    left_out = found.manifest["facts"]["left out"]
    assert left_out == {"rows without a text": 2, "rows without a label": 1}


def test_a_classifier_of_characters_reads_those_that_no_split_has(tmp_path: Path) -> None:
    found = data.prepare_labelled(str(table(tmp_path / "my.csv", numbered(60))), "chars", context=64)
    assert found.tokenizer.convert_ids_to_tokens(found.tokenizer("t😀").input_ids) == ["t", UNKNOWN]
    assert found.vocab_size == len(found.tokenizer)


def test_a_folder_with_train_and_test_gets_its_validation_from_train(tmp_path: Path) -> None:
    rows = numbered(100)
    table(tmp_path / "train.csv", rows[:80])
    table(tmp_path / "test.csv", [*rows[80:], *rows[:5]])
    with pytest.warns(UserWarning, match="rows that also stand in"):
        found = data.prepare_labelled(str(tmp_path), "bytes", context=64)
    assert found.texts("test") == [text for text, _ in (*rows[80:], *rows[:5])]
    assert sum(found.manifest["facts"]["left out"].values()) == 5
    arrays = found.rows("train", np.arange(len(found.labels("train"))))
    train = {
        found.tokenizer.decode(ids[real])
        for ids, real in zip(arrays["input_ids"], arrays["attention_mask"], strict=True)
    }
    assert len(train) + len(found.texts("valid")) == 75
    assert not train & {*found.texts("test"), *found.texts("valid")}


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([(f"text {i}", "x") for i in range(30)], "one class only, 'x'"),
        ([(f"text {i}", i) for i in range(40)], "40 labels in 40 training rows"),
        ([], "bad.csv has no rows\nA table"),
        ([("", 1), (" ", 2)], "no rows for train: left out are 2 rows without a text"),
        ([("a", 1), ("b", 2), ("c", 1), ("d", 2)], "no rows for valid"),
    ],
)
def test_what_cannot_be_learned_is_refused_in_a_line(
    tmp_path: Path, rows: list[tuple[object, object]], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        data.prepare_labelled(str(table(tmp_path / "bad.csv", rows)), "bytes", context=8)


def test_a_train_that_stands_in_test_is_refused_with_the_count(tmp_path: Path) -> None:
    for split in ("train", "test"):
        table(tmp_path / f"{split}.csv", numbered(60))
    said = "no rows for train: left out are 54 train rows that also stand in valid or test"
    with pytest.raises(UsageError, match=said):
        data.prepare_labelled(str(tmp_path), "bytes", context=8)


def test_labels_of_more_digits_than_python_reads_are_in_the_order_of_texts(tmp_path: Path) -> None:
    labels = ["10", "9", "1" * 5000]
    rows: list[tuple[object, object]] = [(f"text {i}", labels[i % 3]) for i in range(60)]
    found = data.prepare_labelled(str(table(tmp_path / "my.csv", rows)), "bytes", context=16)
    assert found.classes == sorted(labels)


def test_labels_that_train_does_not_have_are_named(tmp_path: Path) -> None:
    table(tmp_path / "train.csv", numbered(60))
    table(tmp_path / "test.csv", [("new", "nine"), ("old", 1)])
    with pytest.raises(
        UsageError, match=r"test of .* has 1 rows of classes that train does not have: 'nine'"
    ):
        data.prepare_labelled(str(tmp_path), "bytes", context=8)


def test_a_missing_column_lists_those_there_are(tmp_path: Path) -> None:
    path = table(tmp_path / "my.csv", numbered(30), ("review", "stars"))
    with pytest.raises(UsageError, match="no column 'label' of its own: it has 'review', 'stars'") as told:
        data.prepare_labelled(str(path), context=8, text_column="review")
    assert "--label-column" in told.value.remedy


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "my.csv").write_bytes(b"text,label\ncaf\xe9,1\n")
    with pytest.raises(UsageError, match="not UTF-8 text: byte 0xe9"):
        data.prepare_labelled(str(tmp_path / "my.csv"), context=8)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_a_file_of_utf16_is_refused_with_what_converts_it(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "my.csv").write_bytes("\ufefftext,label\na,1\n".encode(encoding))
    with pytest.raises(UsageError, match="not UTF-8 text") as told:
        data.prepare_labelled(str(tmp_path / "my.csv"), context=8)
    assert "iconv -f UTF-16 -t UTF-8 my.csv" in told.value.remedy


def test_parquet_says_what_reads_it(tmp_path: Path) -> None:
    (tmp_path / "my.parquet").write_bytes(b"PAR1")
    with pytest.raises(UsageError, match=r"my.parquet cannot be read"):
        data.prepare_labelled(str(tmp_path / "my.parquet"), context=8)


def test_a_tokenizer_puts_its_own_tokens_around_a_text(tmp_path: Path) -> None:
    """As BERT's does, which has no end-of-text token either."""
    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "text", "so"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    named = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **named).save_pretrained(tmp_path / "bert")
    path = table(tmp_path / "my.csv", numbered(60))
    found = data.prepare_labelled(str(path), str(tmp_path / "bert"), context=8)
    arrays = found.rows("test", np.arange(3))
    for ids, real, text in zip(
        arrays["input_ids"], arrays["attention_mask"], found.texts("test")[:3], strict=True
    ):
        assert ids[0] == 2
        assert ids[real][-1] == 3
        assert ids[real].tolist() == found.tokenizer(text, truncation=True).input_ids


def test_columns_by_number_where_the_first_row_looks_like_one(tmp_path: Path) -> None:
    """AG News begins with a row of class 3, which is also the number of a column."""
    (tmp_path / "x.csv").write_text('"3","title","more"\n"1","other",""\n')
    news = labelled.NAMED["ag_news"]
    found = list(news._named(news.read, news.first, tmp_path / "x.csv"))
    assert found == [("title more", "Business"), ("other", "World")]


def test_a_set_from_the_hub_has_the_names_of_its_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": f"text {i}", "label": i % 2} for i in range(60)]
    hub_module = SimpleNamespace(
        load_dataset=lambda *names, split, revision: rows[:40] if split == "test" else rows[40:]
    )
    for name, fake in (("has_datasets", lambda: True), ("reachable", lambda: True)):
        monkeypatch.setattr(hub, name, fake)
    monkeypatch.setattr(hub, "import_module", lambda name: hub_module)
    found = data.prepare_labelled("imdb", "bytes", context=16, progress=False)
    assert found.classes == ["negative", "positive"]
    assert found.texts("test") == [row["text"] for row in rows[:40]]


class HubRows(list[dict[str, object]]):
    features = {"review": SimpleNamespace(), "stars": SimpleNamespace(names=["bad", "good"])}  # noqa: RUF012


def from_the_hub(monkeypatch: pytest.MonkeyPatch, splits: dict[str, list[dict[str, object]]]) -> None:
    for name, fake in (("has_datasets", lambda: True), ("reachable", lambda: True)):
        monkeypatch.setattr(hub, name, fake)
    whole = {split: HubRows(rows) for split, rows in splits.items()}
    library = SimpleNamespace(load_dataset=lambda repository, config: whole)
    monkeypatch.setattr(hub, "import_module", lambda name: library)


def of_the_hub(tokenizer: str = "bytes", label: str = "stars") -> LabelledTexts:
    columns = {"text_column": "review", "label_column": label}
    return data.prepare_labelled("someone/films", tokenizer, context=16, progress=False, **columns)


@pytest.mark.parametrize("splits", [("train", "test"), ("train", "validation", "test"), ("train",)])
def test_any_set_of_the_hub_is_taken_by_its_name_and_columns(
    monkeypatch: pytest.MonkeyPatch, splits: tuple[str, ...]
) -> None:
    made = {s: [{"review": f"{s} {i}", "stars": i % 2, "id": i} for i in range(60)] for s in splits}
    from_the_hub(monkeypatch, made)
    found = of_the_hub()
    assert found.classes == ["bad", "good"]
    lengths = {split: len(found.labels(split)) for split in ("train", "valid", "test")}
    assert sum(lengths.values()) == 60 * len(splits)
    assert lengths["test"] == (60 if "test" in splits else 6)
    monkeypatch.setattr(hub, "import_module", lambda name: pytest.fail("fetched again"))
    of_the_hub("words")


def test_a_set_of_the_hub_without_the_column_or_without_labels_is_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden = {s: [{"review": f"{s} {i}", "stars": -1} for i in range(20)] for s in ("train", "test")}
    from_the_hub(monkeypatch, hidden)
    with pytest.raises(UsageError, match=r"no column 'class': it has 'review', 'stars'"):
        of_the_hub(label="class")
    with pytest.raises(UsageError, match="no rows for train"):
        of_the_hub()


def test_small_sets_of_sentences_have_their_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANGEVIN_DATA", str(tmp_path))
    for name, classes in (("sst5", 5), ("mr", 2), ("subj", 2), ("cr", 2)):
        known = labelled.NAMED[name]
        for split, file in known.files.items():
            place = tmp_path / known.folder / file
            place.parent.mkdir(parents=True, exist_ok=True)
            rows = (f"{i % classes} caf\xe9 {split} {i}" for i in range(60))
            place.write_text("\n".join(rows), encoding="utf-8" if name == "sst5" else "cp1252")
        found = data.prepare_labelled(name, "words", context=8, progress=False)
        assert set(found.classes) == set(known.classes)
        assert len(found.labels("test")) == (60 if name == "sst5" else 6)
        assert all("café" in text for text in found.texts("test"))


def test_changed_labels_are_other_data(tmp_path: Path) -> None:
    path, rows = tmp_path / "my.csv", numbered(60)
    before = data.prepare_labelled(str(table(path, rows)), "bytes", context=8).manifest
    after = data.prepare_labelled(
        str(table(path, [(t, 2 - y) for t, y in rows])), "bytes", context=8
    ).manifest  # type: ignore[operator]
    assert same_data(before, before) is None
    assert same_data(before, after) is not None


@pytest.mark.parametrize(("count", "batch"), [(50, 8), (64, 8), (7, 3), (5, 8)])
def test_every_example_comes_once_an_epoch_and_batches_are_of_a_length(count: int, batch: int) -> None:
    lengths = np.random.default_rng(0).choice([8, 16, 64], count)
    whole = [order.epoch_of_examples(lengths, e, seed=3, batch=batch) for e in range(9)]
    for epoch in whole:
        assert sorted(epoch) == list(range(count))
    stream = np.concatenate(whole)
    batches = stream[: len(stream) // batch * batch].reshape(-1, batch)
    mixed = sum(len(set(lengths[rows])) > 1 for rows in batches)
    assert mixed <= 9 * (1 + 2)  # one across the ends of an epoch, two at the borders of three lengths
    assert not np.array_equal(whole[0], whole[1])


def test_lengths_waste_little() -> None:
    sizes = np.concatenate([np.arange(1, 101), [2000]])
    found = few_lengths(sizes, 6, 512)
    assert found[-1] == 512
    assert len(found) <= 6
    read = np.minimum(sizes, 512)
    padded = found[np.searchsorted(found, read)].sum()
    assert padded < 1.25 * read.sum()


def value(tokens: list[str]) -> int:
    """An independent reader of ListOps."""
    word = tokens.pop(0)
    if not word.startswith("["):
        return int(word)
    found = []
    while tokens[0] != "]":
        found.append(value(tokens))
    tokens.pop(0)
    found.sort()
    middle = (found[(len(found) - 1) // 2] + found[len(found) // 2]) / 2
    return {"[MIN": found[0], "[MAX": found[-1], "[MED": int(middle), "[SM": sum(found) % 10}[word]


@pytest.mark.parametrize("made", [NYU, LRA], ids=["nyu", "lra"])
def test_listops_are_right_distinct_and_of_their_parameters(made: ListOps) -> None:
    some = list(islice(made.examples(), 300))
    assert len({text for text, _ in some}) == 300
    for text, label in some:
        tokens, depth, deepest = text.split(), 0, 1
        assert made.shortest <= len(tokens) <= made.longest
        for token in tokens:
            depth += token.startswith("[") - (token == "]")
            deepest = max(deepest, depth + 1)
        assert deepest <= made.depth
        assert str(value(tokens)) == label
    assert some == list(islice(made.examples(), 300))


def test_listops_share_one_vocabulary_and_have_a_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(labelled.GENERATED, "listops", ("", ListOps(train=400, test=50)))
    found = data.prepare_labelled("listops", context=64)
    assert found.vocab_size == 17
    assert [len(found.labels(split)) for split in ("train", "valid", "test")] == [363, 37, 50]
    assert len(found.manifest["splits"]["train"]["text_sha256"]) == 64
    assert len(found.manifest["splits"]["test"]["labels_sha256"]) == 64
