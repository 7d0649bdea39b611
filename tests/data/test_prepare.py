"""From a source to tokens on disk: manifest, cache, damage, interruption, and what a corpus gives."""

import hashlib
import itertools
import json
import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch

from langevin.data import order, prepare, shards
from langevin.data.synthetic.stories import NATS_PER_STORY
from langevin.data.synthetic.stories import stories as tell
from langevin.errors import UsageError

TEXT = "".join(f"{i}: the quick brown fox jumps over lazy dog number {i * i}.\n" for i in range(400))
STORIES = {"train": 60, "valid": 12, "test": 8}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LANGEVIN_DATA", raising=False)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "foxes.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


def leftovers(corpus):
    return [p.name for p in corpus.folder.parent.iterdir() if p.name.endswith((".writing", ".old"))]


def test_the_splits_join_to_the_text_and_decode_to_it(text):
    corpus = prepare(text, "bpe-300")
    parts = [corpus.tokenizer.decode(corpus.tokens(split)) for split in ("train", "valid", "test")]
    assert "".join(parts) == TEXT
    assert all(part.endswith("\n") for part in parts)
    assert 0.9 <= len(parts[0]) / len(TEXT) < 0.91


def test_the_manifest_counts_and_hashes_what_is_there(text):
    corpus = prepare(text, "chars")
    for split, facts in corpus.manifest["splits"].items():
        content = corpus.tokenizer.decode(corpus.tokens(split))
        assert facts["tokens"] == len(corpus.tokens(split))
        assert (facts["characters"], facts["bytes"]) == (len(content), len(content.encode()))
        data = (corpus.folder / f"{split}.bin").read_bytes()
        written = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        assert corpus.manifest["files"][f"{split}.bin"] == written
        assert facts["text_sha256"] == hashlib.sha256(content.encode()).hexdigest()
        sizes = corpus.manifest["splits"][split]
        assert sizes["characters"] == sizes["tokens"]
    assert corpus.manifest["source"]["files"]["foxes.txt"]["bytes"] == len(TEXT)
    assert corpus.manifest["source"]["settings"] == {"valid": 0.05, "test": 0.05}
    assert corpus.manifest["facts"]["split"] == "by position, at lines' borders"
    assert corpus.vocab_size == len(corpus.tokenizer) == len(set(TEXT)) + 1


def test_what_was_prepared_is_opened_again_and_not_made_again(text, monkeypatch):
    first = prepare(text, "bytes")
    monkeypatch.setattr("langevin.data.shards.build", lambda *a: pytest.fail("built again"))
    again = prepare(text, "bytes")
    assert again.folder == first.folder
    assert np.array_equal(again.tokens("train"), first.tokens("train"))


def test_another_text_tokenizer_or_setting_is_another_set(text, tmp_path):
    folders = {
        prepare(text, "bytes").folder,
        prepare(text, "chars").folder,
        prepare(text, "bytes", valid=0.2).folder,
    }
    (tmp_path / "foxes.txt").write_text(TEXT + "more\n")
    folders.add(prepare(text, "bytes").folder)
    assert len(folders) == 4


@pytest.mark.parametrize("file", ["train.bin", "test.bin", "tokenizer/tokenizer.json", "manifest.json"])
@pytest.mark.parametrize("how", ["truncated", "tampered", "removed"])
def test_a_damaged_file_is_refused_by_name_and_made_again(text, file, how):
    corpus = prepare(text, "bytes")
    path = corpus.folder / file
    sound = path.read_bytes()
    damaged = {"truncated": sound[:-7], "tampered": b"\x07" + sound[1:]}
    path.unlink()
    if how in damaged:
        path.write_bytes(damaged[how])
    with pytest.warns(UserWarning, match=file):
        again = prepare(text, "bytes")
    assert path.read_bytes() == sound
    assert again.tokenizer.decode(again.tokens("train")) == TEXT[: len(again.tokens("train"))]
    assert leftovers(again) == []


def test_interrupted_work_leaves_nothing_half_done(text, monkeypatch, tmp_path):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shards, "_repeated", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(text, "bytes")
    assert [p for p in (tmp_path / "cache" / "tokens").iterdir() if p.is_dir()] == []
    assert len(prepare(text, "bytes").tokens("train")) > 0


def test_what_a_killed_process_left_is_removed_by_the_next(text):
    corpus = prepare(text, "bytes")
    left = corpus.folder.rename(corpus.folder.parent / f".{corpus.folder.name}.writing")
    (left / "manifest.json").unlink()
    again = prepare(text, "bytes")
    assert again.folder == corpus.folder
    assert leftovers(again) == []


def test_two_processes_may_prepare_the_same_set_at_once(text, tmp_path):
    code = (
        "from langevin.data import prepare\n"
        f"corpus = prepare({text!r}, 'bpe-300')\n"
        "print(corpus.folder, corpus.manifest['files']['train.bin']['sha256'])"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=100)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert said[0] == said[1]
    folders = [p for p in (tmp_path / "cache" / "tokens").iterdir() if p.is_dir()]
    assert len(folders) == 1


def test_characters_that_train_does_not_have_are_counted(tmp_path):
    for split, content in {"train": "abc abc", "valid": "abcé", "test": "abzz"}.items():
        (tmp_path / f"{split}.txt").write_text(content, encoding="utf-8")
    with pytest.warns(UserWarning, match="characters that train does not have"):
        corpus = prepare(str(tmp_path), "chars")
    counts = {split: facts["unknown_characters"] for split, facts in corpus.manifest["splits"].items()}
    assert counts == {"train": 0, "valid": 1, "test": 2}


@pytest.mark.filterwarnings("ignore:.* stand word for word")
@pytest.mark.parametrize("separator", ["", "<|endoftext|>"], ids=["one text", "documents"])
def test_a_text_is_never_held_whole(text, tmp_path, monkeypatch, separator):
    monkeypatch.setattr(shards, "BATCH_CHARACTERS", 1 << 16)
    monkeypatch.setattr("langevin.data.texts.BLOCK", 1 << 16)
    size = 8_000_000
    line = "The quick brown fox jumps over the lazy dog. " * 20 + f"{separator}\n"
    (tmp_path / "long.txt").write_text(line * (size // len(line)))
    prepare(text, "bytes")  # imports what is needed
    tracemalloc.start()
    try:
        corpus = prepare(str(tmp_path / "long.txt"), "bytes", valid=0.01, test=0.01)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(corpus.tokens("train")) > 0.9 * size
    assert peak < size


def test_many_tokens_need_four_bytes_each(text, monkeypatch):
    monkeypatch.setattr(shards, "SMALL", 100)
    corpus = prepare(text, "bytes")
    assert corpus.tokens("train").dtype == np.uint32
    assert corpus.tokenizer.decode(corpus.tokens("test")) == TEXT[-len(corpus.tokens("test")) :]


@pytest.fixture
def stories():
    return prepare("stories", **STORIES)


def test_documents_end_with_eos_and_decode_to_the_stories(stories):
    told = [one.text for one in tell(8, 0, "test")]
    starts = [*stories.documents("test"), len(stories.tokens("test"))]
    pieces = [stories.tokens("test")[a:b] for a, b in itertools.pairwise(starts)]
    assert [stories.tokenizer.decode(piece[:-1]) for piece in pieces] == told
    assert all(piece[-1] == stories.separator == stories.tokenizer.eos_token_id for piece in pieces)
    assert {split: facts["documents"] for split, facts in stories.manifest["splits"].items()} == STORIES


def test_the_true_entropy_is_in_the_manifest_for_every_split(stories):
    nats = sum(one.nats for one in tell(8, 0, "test"))
    known = stories.manifest["true_entropy"]["test"]
    facts = stories.manifest["splits"]["test"]
    assert known["nats"] == pytest.approx(nats, rel=1e-12)
    assert known["nats_per_token"] == stories.true_nats_per_token("test") == nats / facts["tokens"]
    assert stories.manifest["facts"]["nats_per_story"] == NATS_PER_STORY
    assert stories.manifest["repeated"] == {"train": 0, "valid": 0, "test": 0}


def test_a_batch_is_read_off_the_stream_and_is_the_same_from_a_fresh_corpus(stories):
    settings = {"seed": 3, "batch": 4, "context": 50}
    rows = stories.batch("train", 17, **settings)
    assert (rows.shape, rows.dtype) == ((4, 51), np.int64)
    count = len(stories.tokens("train"))
    where = (order.window_starts(count, 17, **settings)[:, None] + np.arange(51)) % count
    assert np.array_equal(rows, np.asarray(stories.tokens("train"))[where])
    assert np.array_equal(rows, prepare("stories", **STORIES).batch("train", 17, **settings))


def test_tokens_on_a_device_are_those_of_the_file(stories, monkeypatch):
    monkeypatch.setattr("langevin.data.corpus.BLOCK", 1000)  # more than one copy
    whole = stories.device_tokens("train", "cpu")
    assert whole.dtype == torch.int32
    assert np.array_equal(whole, stories.tokens("train"))
    assert np.array_equal(stories.device_tokens("train", "cpu", first=1500), whole[:1500])


def test_rows_go_round_the_circle_of_the_first_tokens(stories):
    rows = stories.rows("train", np.array([5, 98]), 4, first=100)
    assert np.array_equal(rows, np.asarray(stories.tokens("train"))[[[5, 6, 7, 8], [98, 99, 0, 1]]])


def test_training_never_sees_validation_or_test(tmp_path):
    """The splits have no character in common, and an epoch of train has only train's."""
    for split, letter in {"train": "a", "valid": "b", "test": "c"}.items():
        (tmp_path / f"{split}.txt").write_text(letter * 100)
    corpus = prepare(str(tmp_path), "bytes")
    for step in range(20):
        assert set(corpus.batch("train", step, seed=0, batch=2, context=9).ravel()) == {ord("a")}


def test_a_document_begins_with_the_separator_before_it(stories):
    end = stories.separator
    assert end == stories.tokenizer.eos_token_id
    rows = torch.tensor([[5, end, 6, 7, end, 8], [end, end, 1, 2, 3, 4]])
    assert stories.position_ids(rows).tolist() == [[0, 0, 1, 2, 0, 1], [0, 0, 1, 2, 3, 4]]
    assert stories.scored(rows) is None


def test_documents_are_found_without_leaving_a_compiled_graph(stories):
    function = stories.position_ids
    rows = torch.from_numpy(stories.batch("train", 0, seed=0, batch=2, context=200))
    compiled = torch.compile(lambda tokens: function(tokens[:, :-1]), fullgraph=True, backend="eager")
    assert torch.equal(compiled(rows), function(rows[:, :-1]))


def test_an_unknown_split_or_setting_suggests_the_right_one(stories):
    with pytest.raises(UsageError, match="Did you mean 'valid'"):
        stories.tokens("validation")
    with pytest.raises(UsageError, match="Did you mean 'train'"):
        prepare("stories", trains=5)
    with pytest.raises(UsageError, match="valid must be a whole number"):
        prepare("stories", valid=0)


def test_the_manifest_is_plain_json_with_a_version(stories):
    manifest = json.loads((stories.folder / "manifest.json").read_text())
    assert manifest == stories.manifest
    assert manifest["format"] == 2
    assert len(manifest["tokenizer_sha256"]) == 64


def test_importing_the_data_package_does_not_import_torch():
    code = "import langevin.data, sys; langevin.data.names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
