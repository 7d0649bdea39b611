"""Texts are judged beside real ones, by measures that do not fall for samplers made to cheat."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertModel

from evaluation.traps import TRAPS, story_file
from langevin import cli
from langevin.data.tokenizers import encoder
from langevin.environment import environment
from langevin.errors import UsageError
from langevin.evaluation import quality
from langevin.evaluation.judge import Judge, Judged, frontier_area
from langevin.objectives.masked import Masked
from langevin.runs import Run, load, train
from langevin.sampling.text import Sampling
from langevin.settings import TrainConfig

TEXTS, CONTEXT = 48, 64
TEMPERATURES = (0.5, 0.7, 0.85, 1.0)
OF_TRAPS = (0.5, 0.7, 0.85, 1.0, 1.2)  # whoever sets a trap is free to choose
SHAPE: dict[str, Any] = {
    "tokenizer": "bpe-512",
    "layers": 2,
    "width": 64,
    "heads": 4,
    "context": CONTEXT,
    "batch": 16,
    "steps": 200,
    "lr": 5e-3,
    "eval_every": 200,
    "eval_tokens": 2000,
    "precision": "fp32",
    "compile": "off",
    "device": "cpu",
}


def trained(folder: Path, name: str, **changes: Any) -> Run:
    text = folder / "stories.txt"
    if not text.exists():
        text.write_text(story_file(1500))
    config = TrainConfig(**{"data": str(text), **SHAPE, **changes})
    return load(train(config, folder / name, quiet=True)[0].path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quality")


@pytest.fixture(scope="module")
def model(folder: Path) -> Run:
    return trained(folder, "model")


@pytest.fixture(scope="module")
def judge(folder: Path) -> Judge:
    return Judge.read(str(trained(folder, "judge", seed=1).path), "cpu")


@pytest.fixture(scope="module")
def masked(folder: Path) -> Run:
    return trained(folder, "masked", objective="masked", steps=20, eval_every=20)


@pytest.fixture(scope="module")
def rows(model: Run, judge: Judge) -> dict[str, list[Any]]:
    """Of a model and of every trap, through one suite."""
    corpus = model.task.prepare(model.config)
    encode, stream = encoder(model.tokenizer), np.array(corpus.tokens("train")).astype(np.int64)
    stream = stream[stream != corpus.separator]

    def read(at: dict[str, Any], texts: list[str]) -> quality.Texts:
        return quality.Texts(at, texts, [ids for ids, _ in encode(texts, False)], judge.judged(texts), {})

    def of_the_model(temperature: float) -> list[str]:
        sampling = replace(quality.usual(model.objective, CONTEXT), temperature=temperature)
        return quality.written(model, sampling, TEXTS, "cpu", lambda *told: None)[0]

    def of_a_trap(name: str, temperature: float) -> list[str]:
        draw = np.random.default_rng(0)
        return model.tokenizer.batch_decode(TRAPS[name](stream, temperature, TEXTS, CONTEXT - 1, draw))

    real = read(quality.REAL, quality.real_texts(corpus, "test", TEXTS, CONTEXT - 1))
    samples = {"model": [of_the_model(t) for t in TEMPERATURES]}
    samples |= {name: [of_a_trap(name, t) for t in OF_TRAPS] for name in TRAPS}
    found = {}
    for name, texts in samples.items():
        sets = [read({"temperature": t}, some) for t, some in zip(OF_TRAPS, texts, strict=False)]
        found[name], _ = quality.compared([real, *sets], corpus.tokens("train"), 1.0, 100)
    return found


def values(rows: list[Any], metric: str) -> list[float]:
    return [row.value for row in rows if row.metric == metric and row.at != quality.REAL]


@pytest.mark.parametrize("trap", TRAPS)
def test_no_trap_comes_near_the_model_in_what_is_called_quality(
    rows: dict[str, list[Any]], trap: str
) -> None:
    assert quality.QUALITY == ("judge_gap", "mauve")
    worst = max(map(abs, values(rows["model"], "judge_gap")))
    assert min(map(abs, values(rows[trap], "judge_gap"))) > 1.5 * worst
    assert max(values(rows[trap], "mauve")) < 0.8 * min(values(rows["model"], "mauve"))


@pytest.mark.parametrize("metric", quality.DIVERSITY)
def test_what_is_called_diversity_is_cheated_and_so_is_not_quality(
    rows: dict[str, list[Any]], metric: str
) -> None:
    """Higher entropy and distinctness, or less repetition and memory, than the model's best. (Entropy is
    beaten by words at random alone, and only where they are drawn warmer than the model.)"""
    best = max if metric.startswith(("unigram", "distinct")) else min
    found = {name: best(values(some, metric)) for name, some in rows.items()}
    cheat = best(found[name] for name in TRAPS)
    assert best(cheat, found["model"]) == cheat
    assert all(row.kind == "diagnostic" for some in rows.values() for row in some if row.metric == metric)


def handmade(texts: list[list[int]], at: dict[str, Any], nll: float = 1.0) -> quality.Texts:
    tokens = [np.array(ids, np.int64) for ids in texts]
    lengths = np.array([float(len(ids)) for ids in texts])
    features = torch.randn(len(texts), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return quality.Texts(
        at, [str(ids) for ids in texts], tokens, Judged(nll * lengths, lengths, features), {}
    )


def test_diversity_is_what_its_formulas_say() -> None:
    draw = np.random.default_rng(1)
    real = draw.integers(0, 50, (10, 30)).tolist()
    texts = [*draw.integers(0, 4, (8, 30)).tolist(), real[0][:15], real[0][:15]]
    stream = np.array([t for text in real[1:] for t in text] + texts[0][:25] + [99] + texts[1][:20])
    found, details = quality.compared(
        [handmade(real, quality.REAL), handmade(texts, {"temperature": 1.0})], stream, 1.0
    )
    got = {row.metric: row.value for row in found if row.at == {"temperature": 1.0}}
    width = details["width"]
    assert width == 30

    def grams(ids: list[int], n: int) -> list[tuple[int, ...]]:
        return [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]

    for n in quality.REPEATED:
        each = [grams(text, n) for text in texts]
        again = sum(len(g) - len(set(g)) for g in each) / sum(map(len, each))
        assert got[f"repetition_{n}"] == pytest.approx(again)
    for n in quality.DISTINCT:
        pooled = [gram for text in texts for gram in grams(text, n)][: 10 * 30 // 2]
        assert got[f"distinct_{n}"] == pytest.approx(len(set(pooled)) / len(pooled))
    shares = [[text.count(v) / 30 for v in set(text)] for text in texts if len(text) >= width]
    entropy = np.mean([-sum(p * math.log(p) for p in some) for some in shares])
    assert got["unigram_entropy"] == pytest.approx(entropy)
    assert got["duplicates"] == pytest.approx(0.1)
    known = set(grams(stream.tolist(), 20))
    asked = [gram for text in texts for gram in grams(text, 20)]
    assert got["memorised_20"] == pytest.approx(sum(g in known for g in asked) / len(asked))
    assert sum(g in known for g in asked) == 7


def test_twenty_grams_are_found_across_the_parts_in_which_training_text_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = np.random.default_rng(0).integers(0, 9, 200).astype(np.uint16)
    monkeypatch.setattr(quality, "CHUNK", 32)
    assert quality.in_training(stream, [stream[17:77].astype(np.int64)]).tolist() == [41]


def cooling(entropies: list[int], losses: list[float]) -> list[quality.Texts]:
    """Sets of texts with so many different tokens each, the first real."""
    return [
        handmade(
            [[t % n for t in range(64)]] * 4,
            quality.REAL if i == 0 else {"temperature": float(i)},
            nll=loss,
        )
        for i, (n, loss) in enumerate(zip(entropies, losses, strict=True))
    ]


def test_the_gap_is_taken_at_the_entropy_of_real_text_on_the_line_between_two_temperatures() -> None:
    rows, details = quality.compared(cooling([16, 4, 8, 32], [2.0, 1.0, 2.5, 3.5]), np.arange(30), 1.0)
    (gap,) = [row for row in rows if row.metric == "judge_gap" and not row.at]
    assert gap.value == pytest.approx(1.0)  # ln 16 lies half way from ln 8 to ln 32, 3.0 from 2.5 to 3.5
    assert gap.kind == "exact"
    assert gap.low == pytest.approx(1.0)
    assert details["matched"] == pytest.approx(2.5)
    assert "on the line from 2 to 3" in details["said"]


def test_neighbours_of_nearly_one_entropy_lead_nowhere_far() -> None:
    """A resample may find them in any order and as near as it likes."""
    for entropies, expected in (([2.0, 1.9, 1.9 + 1e-12], 5.0), ([1.0, 1.9, 1.9 + 1e-12], -1.0)):
        found = quality.matched(np.array([[0.0], [1.0], [3.0]]), np.array(entropies), 1)
        assert found[-1] == pytest.approx(expected)


def test_a_sweep_that_does_not_reach_the_entropy_of_real_text_says_so() -> None:
    rows, details = quality.compared(cooling([64, 4, 8], [2.0, 1.0, 1.5]), np.arange(30), 1.0)
    assert not [row for row in rows if not row.at]
    assert details["matched"] is None
    assert "Try higher --temperatures" in details["said"]


def test_texts_that_are_too_short_for_an_entropy_are_said_to_be() -> None:
    real, cold, warm = cooling([16, 4, 8], [2.0, 1.0, 1.5])
    short = [replace(one, tokens=[ids[:9] for ids in one.tokens]) for one in (cold, warm)]
    said = quality.compared([real, *short], np.arange(30), 1.0)[1]["said"]
    assert said.startswith("No text that was written has 64 tokens")
    said = quality.compared([real, short[0], warm], np.arange(30), 1.0)[1]["said"]
    assert "they have none, 2.079" in said


def test_the_judge_scores_a_text_from_its_beginning_as_if_it_were_alone(judge: Judge) -> None:
    texts = ["Ben and Mia met at the pond.", "", "Ben had a kite. " * 6, "Zoe"]
    found = judge.judged(texts)
    for i, text in enumerate(texts):
        ids = [judge.tokenizer.eos_token_id, *judge.tokenizer(text).input_ids][:CONTEXT]
        with torch.no_grad():
            p = judge.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        loss = -sum(float(p[at, t]) for at, t in enumerate(ids[1:]))
        assert found.tokens[i] == len(ids) - 1
        assert found.nll[i] == pytest.approx(loss, abs=1e-3)
        alone = judge.judged([text]).features_ND[0]
        torch.testing.assert_close(found.features_ND[i], alone, rtol=1e-4, atol=1e-4)


def test_a_judge_that_begins_no_text_is_refused(judge: Judge) -> None:
    silent = SimpleNamespace(bos_token_id=None, eos_token_id=None)
    with pytest.raises(UsageError, match="no token that a text begins with"):
        replace(judge, tokenizer=silent).judged(["Ben"])


@pytest.mark.parametrize(("vocabulary", "texts"), [(500, 256), (8192, 256), (50_000, 41)])
def test_so_many_texts_are_written_at_once_as_their_logits_leave_room_for(
    vocabulary: int, texts: int
) -> None:
    run: Any = SimpleNamespace(config=SimpleNamespace(context=256))
    run.model = SimpleNamespace(config=SimpleNamespace(vocab_size=vocabulary))
    assert quality.at_once(run, "cuda:1") == texts
    assert 1 <= quality.at_once(run, "cpu") < texts + 1


def test_the_frontier_is_full_for_like_sets_and_empty_for_sets_apart() -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(200, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    alike, apart = frontier_area(a, b), frontier_area(a, b + 20)
    assert alike > 0.8
    assert apart < 0.05
    assert frontier_area(a, a) == pytest.approx(1.0)
    assert frontier_area(a, b) == alike


def test_the_frontier_is_the_area_under_its_curve() -> None:
    a, b = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    found = frontier_area(torch.stack([a] * 10), torch.stack([a] * 5 + [b] * 5))
    p, q = (10.5 / 11, 0.5 / 11), (0.5, 0.5)  # in two clusters, with half a count more in each
    points = [(1.0, 0.0)]
    for share in np.arange(1, 26) / 26:
        r = [share * x + (1 - share) * y for x, y in zip(p, q, strict=True)]
        points.append(
            tuple(
                math.exp(-5 * sum(x * math.log(x / z) for x, z in zip(one, r, strict=True)))
                for one in (q, p)
            )
        )
    points.append((0.0, 1.0))
    area = sum((x - u) * (y + v) / 2 for (x, y), (u, v) in pairwise(points))
    assert found == pytest.approx(area)


def test_texts_are_kept_for_the_same_weights_settings_code_and_device(
    model: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = replace(quality.usual(model.objective, CONTEXT), tokens=8, temperature=0.9)
    asked: list[int] = []
    real = quality.write

    def counted(*args: Any) -> Any:
        asked.append(len(args[2]))
        return real(*args)

    monkeypatch.setattr(quality, "write", counted)
    first, costs = quality.written(model, sampling, 5, "cpu", lambda *told: None)
    assert asked == [5, 1, 1, 1, 1]
    assert costs["calls_per_text"] == 8
    fewer, same = quality.written(model, sampling, 4, "cpu", lambda *told: None)
    assert (fewer, same) == (first[:4], costs)
    assert len(asked) == 5
    known = environment("cpu")
    for other in ({"device": "another GPU"}, {"commit": "0123"}):
        monkeypatch.setattr(quality, "environment", lambda device, other=other: {**known, **other})
        assert quality.written(model, sampling, 5, "cpu", lambda *told: None)[0] == first
    assert asked == [5, 1, 1, 1, 1] * 3


def test_evaluate_shows_and_keeps_what_a_masked_run_writes(
    masked: Run, judge: Judge, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    splits, real_texts = [], quality.real_texts
    monkeypatch.setattr(
        quality,
        "real_texts",
        lambda corpus, split, *args, **more: (
            splits.append(split) or real_texts(corpus, split, *args, **more)
        ),
    )
    command = ["evaluate", str(masked.path), "--device", "cpu", "--masks", "1", "--batch", "64"]
    command += ["--samples", "4", "--judge", judge.name, "--steps", "6", "--temperatures", "0.1,3"]
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert splits == ["test", "valid"]  # what is compared with, and what its ceiling is made of
    for text in (
        "real text",
        "at 0.1",
        "at real entropy",
        "diversity, not quality",
        "judge gap",
        "50% taken",
    ):
        assert text in shown
    kept = json.loads((masked.path / "evaluation-test.json").read_text())
    found = {(row["metric"], row["at"].get("temperature", row["at"].get("text"))) for row in kept["rows"]}
    assert {("judge_gap", 3.0), ("judge_nll", "real"), ("mauve", "real"), ("repetition_4", 0.1)} <= found
    calls = [row["value"] for row in kept["rows"] if row["metric"] == "calls_per_text"]
    assert len(calls) == 2
    assert 0 < min(calls) <= max(calls) <= 6  # a text may end before its last step
    assert kept["quality"]["infill"] == "both sides were given"
    assert kept["quality"]["sampling"]["steps"] == 6
    assert kept["quality"]["recovery"] == "what is committed stays: nothing is repaired"
    accuracies = [row for row in kept["rows"] if row["metric"] == "infill_accuracy"]
    assert [row["at"].get("gap") for row in accuracies] == [0.1, 0.3, 0.5, None]


def test_a_model_that_knows_the_text_restores_its_middle(model: Run) -> None:
    """The sampler stands for one: what it is asked for is a prefix, and the rest of the text follows."""
    corpus = model.task.prepare(model.config)
    whole_texts = quality.real_texts(corpus, "test", 8, 100)
    texts = [text[i + 40 :] for i, text in enumerate(whole_texts)]  # of which none begins as another
    tokens = [ids for ids, _ in encoder(model.tokenizer)(texts, False)]

    def knows(model: Any, tokenizer: Any, requests: Any, sampling: Any, **options: Any) -> Any:
        assert sampling.temperature == 0
        found = []
        for request in requests:
            (whole,) = [text for text in texts if text.startswith(request.prompt)]
            before = len(tokenizer(request.prompt).input_ids)
            found.append(SimpleNamespace(ids=tokenizer(whole).input_ids[before:][: sampling.tokens]))
        return found

    run: Any = SimpleNamespace(
        objective=SimpleNamespace(sampler=lambda: knows),
        model=model.model,
        tokenizer=model.tokenizer,
        environment=model.environment,
        config=model.config,
    )
    sampling = quality.usual(model.objective, CONTEXT)
    rows, how = quality.infilled(run, [ids[:40] for ids in tokens], sampling, "cpu", lambda *told: None)
    assert [row.value for row in rows] == [1.0] * 4
    assert how == "only the text before the gap was given"


def test_a_sampler_that_refuses_gaps_is_given_what_is_before_them_and_that_is_said(folder: Path) -> None:
    run = trained(folder, "blocks", objective="masked(block=4)", steps=2, eval_every=2)
    texts = quality.real_texts(run.task.prepare(run.config), "test", 2, CONTEXT - 1)
    tokens = [ids for ids, _ in encoder(run.tokenizer)(texts, False)]
    sampling = quality.usual(run.objective, CONTEXT)
    rows, how = quality.infilled(run, [ids[:30] for ids in tokens], sampling, "cpu", lambda *told: None)
    assert len(rows) == 4
    assert how.startswith("only the text before the gap was given: in blocks of 4")


def test_recovery_is_the_share_of_wrong_tokens_that_come_right_beside_that_of_right_ones_spoiled() -> None:
    true = np.arange(4 * 500).reshape(4, 500) % 97

    def half(model: Any, tokens: torch.Tensor, sampling: Any) -> torch.Tensor:
        assert sampling.temperature == 0
        repaired = torch.from_numpy(true.copy())
        repaired[:, ::2] = tokens[:, ::2]
        repaired[:, :100] = 0
        return repaired

    run: Any = SimpleNamespace(model=None, objective=SimpleNamespace(repaired=half))
    (right, spoiled), _ = quality.recovery(run, list(true), Sampling(), "cpu")
    assert right.value == pytest.approx(0.4, abs=0.12)
    assert spoiled.value == pytest.approx(0.2, abs=0.03)
    run.objective.repaired = lambda model, tokens, sampling: tokens
    (right, _), _ = quality.recovery(run, list(true % 2), Sampling(), "cpu")
    assert right.value == 0  # a token that chance put right was never wrong


def test_recovery_is_zero_by_design_only_where_nothing_is_opened_again(masked: Run) -> None:
    tokens = [np.arange(20)]
    plain = quality.usual(masked.objective, CONTEXT)
    rows, said = quality.recovery(masked, tokens, plain, "cpu")
    assert [row.value for row in rows] == [0, 0]
    assert said == "what is committed stays: nothing is repaired"
    opening = replace(plain, order="ancestral", remask="cap")  # type: ignore[call-arg]
    rows, said = quality.recovery(masked, tokens, opening, "cpu")
    assert [row.metric for row in rows] == ["corruption_recovery", "corruption_spoiled"]
    assert said == "what the rest of a text speaks against is written anew"
    swept = replace(plain, sweeps=2)  # type: ignore[call-arg]
    rows, said = quality.recovery(masked, tokens, swept, "cpu")
    assert rows[1].value > 0
    assert said == "all of it is drawn again"
    in_blocks: Any = SimpleNamespace(model=None, objective=Masked(block=4))
    rows, said = quality.recovery(in_blocks, tokens, opening, "cpu")
    assert not rows
    assert said.startswith("not measured")


def encoder_in(folder: Path, kind: Any) -> str:
    shape = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    kind(BertConfig(**shape, intermediate_size=8)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--samples", "4"], "--samples and --judge go together"),
        (["--judge", "gpt2"], "--samples and --judge go together"),
        (["--samples", "1", "--judge", "JUDGE"], "samples=1 must be 2 or more"),
        (["--samples", "999999", "--judge", "JUDGE"], "--samples asks for 999999"),
        (["--samples", "4", "--judge", "nowhere/at/all"], "there is no model"),
        (["--samples", "4", "--judge", "JUDGE", "--temperatures", "warm"], "names no temperatures"),
        (["--samples", "4", "--judge", "JUDGE", "--temperatures", "1,0.5"], "must grow"),
        (["--samples", "4", "--judge", "JUDGE", "--temperatures", "-1,2"], "must be 0 or more"),
        (["--samples", "4", "--judge", "JUDGE", "--temperature", "0.5"], "written at --temperatures"),
        (["--samples", "4", "--judge", "JUDGE", "--steps", "5"], "--steps is for the objective masked"),
        (["--top-k", "5"], "no texts are written"),
        (["--temperatures", "0.5,0.6"], "no texts are written"),
        (["--samples", "4", "--judge", "MASKED"], "does not predict the next token"),
        (["--samples", "4", "--judge", "ENCODER"], "does not predict the next token"),
    ],
)
def test_what_cannot_be_judged_is_refused_in_a_line(
    model: Run,
    judge: Judge,
    masked: Run,
    tmp_path: Path,
    flags: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {"JUDGE": judge.name, "MASKED": str(masked.path)}
    if "ENCODER" in flags:
        names["ENCODER"] = encoder_in(tmp_path / "encoder", BertForMaskedLM)
    words = [names.get(word, word) for word in flags]
    assert cli.main(["evaluate", str(model.path), "--device", "cpu", *words]) == 2
    error = capsys.readouterr().err
    assert said in " ".join(error.split())
    assert "Traceback" not in error


def test_a_model_without_a_head_is_no_judge(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not predict the next token"):
        Judge.read(encoder_in(tmp_path, BertModel), "cpu")
