"""Evaluation document by document: each from its own beginning, each token once."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from langevin.data import prepare
from langevin.errors import UsageError
from langevin.evaluation.documents import Documents
from langevin.evaluation.likelihood import score, summary

LENGTHS = (5, 1, 40, 17, 64, 3, 2, 90, 33, 8)


@pytest.fixture(params=["text eos", "bos text"])
def corpus(request, tmp_path, monkeypatch):
    """Documents of these many bytes; with `bos text`, the end of text becomes the beginning of the next."""
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))
    texts = ["".join(chr(97 + (7 * n + i * i) % 26) for i in range(n)) for n in LENGTHS]
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("<|endoftext|>".join(texts + texts[: split == "test"]))
    with pytest.warns(UserWarning, match="stand word for word"):
        made = prepare(str(tmp_path), "bytes")
    if request.param == "bos text":
        tokens = np.roll(made.tokens("test"), 1)
        made._tokens["test"] = tokens
        made.manifest["layout"] = request.param
    return made


def history(tokens):
    """A model that remembers all it has read: any other context, and the prediction is another."""
    place = torch.arange(1.0, tokens.shape[1] + 1)
    seen = ((tokens + 1) * place.sin()).cumsum(1)
    return torch.sin(seen[..., None] * torch.arange(1.0, 258.0))


def alone(corpus):
    """The documents, each with the separator in front."""
    stream, starts = corpus.tokens("test").tolist(), [*corpus.documents("test")]
    rows = [stream[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
    return rows if corpus.begins_with_bos else [[corpus.separator, *row] for row in rows]


def test_a_document_is_scored_as_if_it_were_alone(corpus):
    rows = alone(corpus)
    scores = score(history, Documents(corpus, "test", 128, batch=3), device="cpu")
    assert len(scores) == sum(len(row) - 1 for row in rows)
    ends = 0 if corpus.begins_with_bos else 1
    assert Counter(scores.unit.tolist()) == {i: n + ends for i, n in enumerate((*LENGTHS, LENGTHS[0]))}
    for document, row in enumerate(rows):
        tokens = torch.tensor([row])
        expected = torch.nn.functional.cross_entropy(history(tokens[:, :-1])[0], tokens[0, 1:])
        assert scores.nll[scores.unit == document].mean() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize(
    ("length", "stride", "batch", "limit"), [(16, 4, 3, None), (7, None, 1, 150), (1, 1, 50, 9)]
)
def test_each_token_is_scored_once_however_long_the_document(corpus, length, stride, batch, limit):
    windows = Documents(corpus, "test", length, stride, batch, limit)
    found: dict[int, list[int]] = {}
    for tokens, scored, unit in windows:
        assert tokens.shape[1] - 1 <= length
        for row, counts, name in zip(tokens, scored, unit, strict=True):
            places = counts.nonzero()[:, 0].tolist()
            assert places == list(range(places[0], places[-1] + 1))
            assert places[0] == 0 or places[0] >= length - (stride or length)  # what it can look back on
            found.setdefault(int(name[0]), []).extend(row[1:][counts].tolist())
    rows = alone(corpus)
    if limit is None:
        assert {i: Counter(row[1:]) for i, row in enumerate(rows)} == {
            i: Counter(f) for i, f in found.items()
        }
    expected = len(corpus.tokens("test")[:limit])
    starts = int((corpus.documents("test") < expected).sum())
    assert sum(map(len, found.values())) == expected - starts * corpus.begins_with_bos


def test_a_text_without_documents_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("a line\n" * 100)
    with pytest.raises(UsageError, match="without documents"):
        Documents(prepare(str(tmp_path / "a.txt"), "bytes"), "test", 8)


@pytest.mark.parametrize("settings", [{"length": 0}, {"length": 4, "stride": 5}, {"length": 4, "batch": 0}])
def test_windows_that_would_leave_tokens_out_are_refused(corpus, settings):
    with pytest.raises(UsageError):
        Documents(corpus, "test", **settings)


DATA = Path(os.environ.get("LANGEVIN_DATA", ""))
STORIES, LLAMA = DATA / "sampled-stories" / "test.txt", DATA / "models" / "stories15M"


@pytest.mark.skipif(
    not (STORIES.is_file() and LLAMA.is_dir()), reason="LANGEVIN_DATA has no sampled-stories or stories15M"
)
def test_the_model_that_wrote_the_stories_scores_at_their_entropy(tmp_path, monkeypatch):
    """1.09 nats a token over all of them, each from its bos, the end not scored; 1.04 over these 40."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))
    stories = STORIES.read_text()[:60_000].split("<|endoftext|>")[:40]
    for split, some in {"train": stories[:1], "valid": stories[1:2], "test": stories}.items():
        (tmp_path / f"{split}.txt").write_text("<|endoftext|>".join(some))
    with pytest.warns(UserWarning, match="stand word for word"):
        corpus = prepare(str(tmp_path), str(LLAMA))
    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32)
    scores = score(model, Documents(corpus, "test", 256, batch=8), device="cpu")
    found = summary(scores, characters=corpus.text_size("test")[0])
    assert found.units == 40
    assert found.nll.value == pytest.approx(1.0364, abs=0.002)
    assert found.nll.low < 1.09 < found.nll.high
    ids = torch.tensor([corpus.tokenizer(stories[2].strip()).input_ids])
    whole = model(ids, labels=ids).loss
    assert scores.nll[scores.unit == 2].mean() == pytest.approx(whole.item(), rel=1e-4)
