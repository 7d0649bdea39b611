"""CSV, TSV and JSON Lines files: each row is a document."""

import csv
import json
from types import SimpleNamespace

import pytest

from langevin.data import prepare, tables
from langevin.errors import UsageError

TEXTS = [f'Row {i}: "quoted", with, commas,\nanother line\ttab and a "' for i in range(60)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))


def write(path, texts, encoding="utf-8"):
    with open(path, "w", encoding=encoding, newline="") as file:
        if path.suffix == ".jsonl":
            file.writelines(json.dumps({"id": i, "text": text}) + "\n\n" for i, text in enumerate(texts))
        else:
            writer = csv.writer(file, delimiter=tables.DELIMITERS[path.suffix])
            writer.writerows([["id", "text"], *enumerate(texts)])
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_rows_are_documents(tmp_path, suffix, encoding):
    corpus = prepare(str(write(tmp_path / f"a{suffix}", TEXTS, encoding)), "bytes")
    assert corpus.has_documents
    text = "".join(corpus.tokenizer.decode(corpus.tokens(split)) for split in ("train", "valid", "test"))
    assert text == "".join(f"{one}<|endoftext|>" for one in TEXTS)


def test_tables_may_be_named_as_splits(tmp_path):
    for split, part in {"train": TEXTS[:40], "dev": TEXTS[40:50], "test": TEXTS[50:]}.items():
        write(tmp_path / f"{split}.jsonl", part)
    counts = [facts["documents"] for facts in prepare(str(tmp_path), "bytes").manifest["splits"].values()]
    assert counts == [40, 10, 10]


def test_the_column_of_the_text_can_be_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("id,body\n" + "".join(f"{i},Story {i}.\n" for i in range(50)))
    with pytest.raises(UsageError, match="no column 'text' of its own: it has 'id', 'body'"):
        prepare(str(path), "bytes")
    with pytest.raises(UsageError, match="no column 'story'"):
        prepare(str(path), "bytes", text_column="story")
    corpus = prepare(str(path), "bytes", text_column="body")
    assert corpus.tokenizer.decode(corpus.tokens("train")).startswith("Story 0.<|endoftext|>Story 1.")
    assert corpus.folder != prepare(str(path), "bytes", text_column="id").folder


def test_without_a_header_a_column_has_a_number(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("".join(f'"{i}","Story {i}.",""\n' for i in range(50)))
    assert list(tables.rows(path, "2"))[:2] == ["Story 0.", "Story 1."]


def test_quotes_of_a_tsv_file_that_do_not_pair_up_are_characters(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text('id\ttext\n0\t"I Am Curious" is a film\n1\t5" long\n')
    assert list(tables.rows(path, None)) == ['"I Am Curious" is a film', '5" long']


def test_quotes_of_a_tsv_file_that_pair_up_by_chance_swallow_no_rows(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text('label\ttext\n0\t"Never again\n1\tfine\n\n0\tno more"\n1\tlast\n')
    assert list(tables.rows(path, None)) == ['"Never again', "fine", 'no more"', "last"]
    path.write_text('a\ttext\tb\n"x\tone\t2"\ny\ttwo\t3\n')
    assert list(tables.rows(path, None)) == ["one", "two"]


def test_quotes_around_fields_of_a_tsv_file_are_taken_off(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text('id\ttext\n0\t"she said ""no"""\n1\t"plain"\n')
    assert list(tables.rows(path, None)) == ['she said "no"', "plain"]
    path.write_text('text\n"two\nlines"\none\n')
    assert list(tables.rows(path, None)) == ["two\nlines", "one"]


def test_what_a_row_of_jsonl_does_not_have_is_empty(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"label": 0}\n{"text": null, "label": 1}\n{"text": "a"}\n{"text": "b", "label": null}\n'
    )
    assert list(tables.records(path, ["text", "label"])) == [("", "0"), ("", "1"), ("a", ""), ("b", "")]
    assert list(tables.rows(path, None)) == ["a", "b"]


def test_nulls_of_parquet_are_empty(tmp_path, monkeypatch):
    """Read by a stand-in, as pyarrow is not needed here."""
    rows = [{"text": None, "label": 1}, {"text": "a", "label": None}]
    file = SimpleNamespace(
        schema_arrow=SimpleNamespace(names=["text", "label"]),
        iter_batches=lambda columns: [SimpleNamespace(to_pylist=lambda: rows)],
    )
    monkeypatch.setattr(
        tables, "import_module", lambda name: SimpleNamespace(ParquetFile=lambda path: file)
    )
    found = list(tables.records(tmp_path / "a.parquet", ["text", "label"]))
    assert found == [("", "1"), ("a", "")]


def test_a_field_may_be_long(tmp_path):
    path = write(tmp_path / "a.csv", ["x" * 200_000])
    assert list(tables.rows(path, None)) == ["x" * 200_000]


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("a.csv", "id,text\n0,fine\n1,one, two\n", "line 3 has 3 fields instead of 2"),
        ("a.csv", 'id,text\n0,fine\n1,"never closed\n', "line 3 cannot be read"),
        ("a.csv", 'id,text\n0,"a" b\n', "line 2 cannot be read"),
        ("a.csv", "text,text\na,b\n", "no column 'text' of its own"),
        ("a.tsv", "id\ttext\n0\ta\tb\n", "line 2 has 3 fields"),
        ("a.jsonl", '{"text": "a"}\n{"text": \n', "line 2 cannot be read"),
        ("a.jsonl", '{"text": "a"}\n[1]\n', "line 2 cannot be read: it is no object"),
        ("a.jsonl", '{"text": "a"}\n\n{"text": 5}\n', "line 3 cannot be read: 'text' is 5"),
        ("a.jsonl", '{"id": 1}\n{"body": "b"}\n', "no column 'text' of its own: it has 'id', 'body'"),
        ("a.jsonl", '{"text": "\\ud800"}\n', "line 1 cannot be read"),
        ("a.jsonl", "[" * 100_000, "line 1 cannot be read"),
        ("a.txt", "id,text\n", "is no table"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(tmp_path, name, content, cause):
    (tmp_path / name).write_text(content)
    column = "text" if name == "a.txt" else None
    with pytest.raises(UsageError, match=cause) as error:
        prepare(str(tmp_path / name), "bytes", **({"text_column": column} if column else {}))
    assert str(tmp_path / name) in error.value.cause
    assert "\n" not in error.value.cause


def test_rows_without_a_text_are_told(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text('{"text": "once"}\n{"content": "upon"}\n{"text": null}\n{"text": " "}\n')
    with pytest.warns(UserWarning, match="3 rows have no text and are left out"):
        assert list(tables.rows(path, None)) == ["once"]
