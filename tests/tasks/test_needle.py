"""Needle retrieval from training to the grid: what an oracle scores, resuming, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import langevin
from langevin import cli
from langevin.evaluation.likelihood import wilson
from langevin.evaluation.retrieval import KEYS
from langevin.settings import TrainConfig
from langevin.tasks import TASKS
from training.small_run import TEXT, dying_at_step, fingerprint, train_in_a_process

SMALL: dict[str, Any] = {
    "layers": 1,
    "width": 16,
    "heads": 2,
    "context": 32,
    "batch": 4,
    "positions": "none",
}
SMALL |= {"device": "cpu", "precision": "fp32", "compile": "off", "eval_tokens": 256, "data": "noise"}


class Oracle(nn.Module):
    """Looks every token up in what it read: the one that came behind its first occurrence comes again."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.config = vocabulary, SimpleNamespace()
        self.embed = nn.Embedding(2, 2)

    def get_input_embeddings(self) -> Any:
        return self.embed

    def forward(self, tokens: torch.Tensor, logits_to_keep: int, use_cache: bool) -> Any:
        same = tokens[:, :, None] == tokens[:, None, :]
        behind = tokens.roll(-1, 1).gather(1, same.int().argmax(-1))
        logits = nn.functional.one_hot(behind, self.vocabulary).float()[:, -logits_to_keep:]
        return SimpleNamespace(logits=logits)


def measured(task: Any, config: TrainConfig, model: Any) -> tuple[dict[Any, Any], dict[str, Any]]:
    rows, details = task.measure(SimpleNamespace(config=config), model, "test")
    return {(row.metric, *row.at.items()): row for row in rows}, details


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(TEXT * 3)
    return str(path)


@pytest.mark.parametrize("filler", ["noise", "text"])
def test_an_oracle_finds_all_of_them_and_every_cell_counts_what_it_says(filler: str, text: str) -> None:
    task = TASKS.parse("needle(rows=30, lengths='32,50,256', depths='0,0.3,1', at=50)")
    filler, tokenizer = ("noise", None) if filler == "noise" else (text, "bytes")
    config = TrainConfig(**{**SMALL, "task": "needle", "data": filler, "tokenizer": tokenizer})
    data = task.prepare(config)
    rows, details = measured(task, config, Oracle(data.vocab_size))
    for axis, places in (("depth", (0, 0.3, 1)), ("position", (0, 15, 50)), ("distance", (0, 35, 50))):
        for place in places:
            cell = rows["accuracy", ("length", 50), (axis, place)]
            assert (cell.value, cell.n) == (1.0, 30)
            assert cell.high == 1.0 > cell.low > 0.85
    assert rows["accuracy", ("length", 256)].n == 90
    assert (rows["accuracy",].value, rows["accuracy",].n) == (1.0, 90)
    assert rows["answers_of_other_keys",].value == 0
    assert details["examples"] == [1.0] * 90
    assert sum(len(key) == 3 for key in rows) == 3 * 3 * 3


def test_an_oracle_recalls_every_key_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("langevin.evaluation.cost.state_bytes", lambda model, length: 512)
    task = TASKS.parse("needle(form='mqar', needles=8, rows=20, lengths='32,64')")
    config = TrainConfig(**{**SMALL, "task": "needle"})
    rows, _ = measured(task, config, Oracle(48))
    assert {key: row.value for key, row in rows.items()} == {
        ("accuracy",): 1.0,
        ("accuracy", ("length", 32)): 1.0,
        ("accuracy", ("length", 64)): 1.0,
        ("accuracy", ("state", 512)): 1.0,
    }
    batch = task.batch(task.prepare(config), config, 0)
    assert (batch["scored"].sum(1) >= 8).all()  # rows to learn from are easy and hard


def test_it_learns_in_seconds_and_holds_at_eight_times_the_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--width 32 --context 32 --needles 2 --keys 4 --values 4 --words 4 --rows 20 --steps 200"
    out = tmp_path / "run"
    assert (
        cli.main(["train", "--task", "needle", *flags.split(), "--device", "cpu", "--out", str(out)]) == 0
    )
    run = langevin.load(out)
    assert (run.config.mixer, run.config.optimizer) == ("neighbor(iters=1); ssmax", "muon")
    rows = {
        tuple(row["at"].items()): row
        for row in run.evaluation("valid")["rows"]
        if row["metric"] == "accuracy"
    }
    assert rows[()]["value"] == rows[("length", 256),]["value"] > 0.9
    capsys.readouterr()
    other = ["--task", "needle(lengths='40', depths='0.5')", "--json"]  # and with its own 4 keys
    assert cli.main(["evaluate", str(out), "--device", "cpu", *other]) == 0
    first = json.loads(capsys.readouterr().out)["rows"][0]
    assert (first["value"], first["n"]) == (pytest.approx(1, abs=0.2), 20)
    other = ["--task", "needle(lengths='40', depths='0.5', rows=500)", "--json"]  # the default, said anew
    assert cli.main(["evaluate", str(out), "--device", "cpu", *other]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["n"] == 500
    assert cli.main(["evaluate", str(out), "--device", "cpu", "--task", "lengths"]) == 2
    assert "a run of the task needle reads no words" in capsys.readouterr().err
    assert cli.main(["generate", str(out)]) == 2
    assert "a run of the task needle has no words to write" in capsys.readouterr().err


def test_killed_and_resumed_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    config = TrainConfig(**SMALL, task="needle", steps=12, eval_every=4, checkpoint_every=4)
    whole, _ = langevin.train(config, tmp_path / "whole", quiet=True)
    (tmp_path / "settings.yaml").write_text(config.as_yaml())
    assert train_in_a_process(tmp_path / "settings.yaml", tmp_path / "killed", dying_at_step(6)) != 0
    assert train_in_a_process(tmp_path / "settings.yaml", tmp_path / "killed") == 0
    assert fingerprint(whole.path, 12) == fingerprint(tmp_path / "killed", 12)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--depths 0,1.5",
            "langevin: a depth of 1.5 is outside 0 to 1, the first place and the last\nGive",
        ),
        ("--depths a", "langevin: 'a' names no depths\nWrite numbers with commas: 0,0.5,1."),
        ("--lr -1", "langevin: lr=-1.0 must be positive\nSee langevin train --help."),
        ("--positions learned --mixer ssmax --lengths 128", "128 is beyond the 64 learned positions"),
        ("--needles 17", "17 needles are more than 16 keys and 16 values allow"),
        ("--context 8", "a length of 8 has no room for 4 needles"),
        ("--lengths 64,many", "'64,many' names no lengths"),
        ("--lengths 64,128 --at 256", "at=256 is no length that is tried"),
        ("--lengths 128 --at 64", "at=64 is no length that is tried\nChoose one of [128]"),
        ("--keys 10000000000000", "keys=10000000000000) must be from 1 to 1,000,000"),
        ("--train-tokens 100 --data stories", "haystacks of stories have no use for --train-tokens"),
        ("--tokenizer bytes", "haystacks of noise have no use for --tokenizer"),
        ("--objective masked", "does not predict what comes last"),
        ("--init stories15M", "keys and values are tokens of their own"),
    ],
)
def test_what_cannot_be_is_told_in_a_line(
    flags: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("langevin.training.start._like_the_pretrained", lambda config: config)
    assert cli.main(["train", "--task", "needle", *flags.split(), "--out", str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize(
    "flags",
    [
        "--stride 4",
        "--masks 2",
        "--left-to-right 2",
        "--samples 2 --judge run",
        "--temperatures 1",
        "--top-k 2",
    ],
)
def test_what_another_task_has_no_use_for_is_refused_in_a_line(
    flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["evaluate", str(tmp_path), "--task", "needle(rows=2)", *flags.split()]) == 2
    told = capsys.readouterr().err
    said = f"{flags.split()[0]} does not go with --task"
    assert ("nothing to sample" if flags == "--top-k 2" else said) in told
    assert "Traceback" not in told


def test_wilson_intervals_are_those_of_the_textbook() -> None:
    """Of Newcombe 1998 (Statistics in Medicine 17, 857-872), table I, method 3."""
    for right, of, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611)):
        found = wilson(right, of)
        assert (found.value, found.low, found.high) == pytest.approx((right / of, low, high), abs=1e-4)


def test_any_model_that_reads_text_is_tried_with_needles_in_words(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {**SMALL, "data": text, "tokenizer": "bytes", "context": 160, "positions": "learned"}
    lm = TrainConfig(**shape, steps=0)
    run, _ = langevin.train(lm, tmp_path / "lm", quiet=True)
    where = str(run.path / "model")
    command = ["evaluate", where, "--device", "cpu", "--data", text, "--task"]
    assert cli.main([*command, "needle(needles=2, rows=3, lengths='160', depths='0,1')", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    cells = [row for row in told["rows"] if "depth" in row["at"]]
    assert [(row["at"]["length"], row["at"]["depth"], row["n"]) for row in cells] == [
        (160, 0, 3),
        (160, 1, 3),
    ]
    assert cli.main([*command, "needle(lengths='161')"]) == 2
    assert "161 is beyond the 160 learned positions" in capsys.readouterr().err
    assert cli.main([*command, "needle(lengths='-3')"]) == 2
    assert "a length of -3 is too short" in capsys.readouterr().err
    assert cli.main([*command, "needle(lengths='90')"]) == 2
    assert "no room for 4 needles" in capsys.readouterr().err
    assert cli.main([*command, "lengths"]) == 2
    assert "the task lengths is not for this model" in capsys.readouterr().err
    masked, _ = langevin.train(replace(lm, objective="masked"), tmp_path / "masked", quiet=True)
    command[1] = str(masked.path)
    assert cli.main([*command, "needle(lengths='160')"]) == 2
    assert "LangevinForMaskedLM, which does not predict the next token" in capsys.readouterr().err


@pytest.mark.parametrize("tokenizer", ["words", "chars"])
def test_a_model_that_reads_one_word_for_all_keys_is_refused(
    tokenizer: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which would be right wherever it says that word."""
    config = TrainConfig(**{**SMALL, "data": text, "tokenizer": tokenizer}, steps=0)
    run, _ = langevin.train(config, tmp_path / "lm", quiet=True)
    command = ["evaluate", str(run.path), "--device", "cpu", "--data", text, "--task", "needle(rows=2)"]
    assert cli.main(command) == 2
    assert "the tokenizer of the model does not know" in capsys.readouterr().err


def test_needles_in_words_stand_where_they_should_and_nowhere_else(text: str) -> None:
    from langevin.data import prepare
    from langevin.data.synthetic.needle import Draw
    from langevin.evaluation.retrieval import InWords, refuse_beyond_positions

    corpus = prepare(text, tokenizer="bytes", progress=False)
    words = InWords(Oracle(corpus.vocab_size), corpus.tokenizer, corpus, needles=3, samples=1)
    assert refuse_beyond_positions(words.model, 10**6) is None
    for depth in (0.0, 0.5, 1.0):
        tokens, answer, begins = words.row(Draw(7), 400, depth)
        assert len(tokens) == 400
        read = corpus.tokenizer.decode(tokens)
        number = corpus.tokenizer.decode(tokens[-answer:]).strip()
        (key,) = [key for key in KEYS if read.endswith(f"\nThe secret number of {key} is {number}")]
        assert read.count(number) == 2
        needle = f"\nThe secret number of {key} is {number}.\n"
        assert read.count(needle) == 1
        assert corpus.tokenizer.decode(tokens[begins:]).startswith(needle)
        before, _, after = read.partition(needle)
        hay = [len(re.sub(r"\nThe secret number.*\n?", "", part)) for part in (before, after)]
        assert hay[0] == int(depth * sum(hay))
        others = set(re.findall(r"\nThe secret number of \w+ is (\d{4})\.\n", read)) - {number}
        assert len(others) == 2
        assert all(read.count(other) == 1 for other in others)


def test_a_comparison_has_the_flags_of_the_task_and_the_mixers_of_its_arms(tmp_path: Path) -> None:
    arms = [f"neighbor(iters=1); {mixer}" for mixer in ("softmax", "ssmax")]
    size = "--rows 5 --lengths 64 --width 16 --heads 2 --steps 2 --seeds 0 --workers 0 --quiet"
    assert (
        cli.main(["compare", *arms, "--task", "needle", *size.split(), "--out", str(tmp_path / "c")]) == 0
    )
    found = json.loads((tmp_path / "c" / "results.json").read_text())
    assert [arm["settings"]["mixer"] for arm in found["parts"][0]["arms"]] == arms
