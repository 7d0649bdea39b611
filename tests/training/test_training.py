"""What a training run does, besides surviving."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_run import fingerprint, small

import langevin
from langevin import cli
from langevin.data import feed
from langevin.errors import UsageError, WorkError
from langevin.mixers import Scalars
from langevin.runs import train
from langevin.settings import TrainConfig
from langevin.training import loop, optim
from langevin.training.progress import Progress
from langevin.training.start import build, estimate, resolved


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))


def test_the_loss_falls_and_the_best_model_is_kept(tmp_path: Path) -> None:
    config = small(tmp_path, steps=60, eval_every=20, lr=5e-3, mixer="ssmax", dropout=0.0)
    train(config, tmp_path / "run", quiet=True)
    run = langevin.load(tmp_path / "run")
    losses = [row["loss"] for row in run.metrics("valid")]
    assert losses[-1] < losses[0] - 0.3
    assert run.config == config
    tokens = run.tokenizer("Ann had", return_tensors="pt").input_ids
    assert run.model(tokens).logits.shape == (1, tokens.shape[1], run.model.config.vocab_size)
    assert run.environment["data"]["splits"]["train"]["tokens"] > 1000


def test_parts_of_a_batch_add_up_to_the_whole(tmp_path: Path) -> None:
    weights = []
    for parts in (1, 2, 4):
        config = small(tmp_path, steps=3, accumulate=parts, mixer="softmax", dropout=0.0)
        train(config, tmp_path / f"run-{parts}", quiet=True)
        weights.append(langevin.load(tmp_path / f"run-{parts}").model.lm_head.weight)
    torch.testing.assert_close(weights[0], weights[1])
    torch.testing.assert_close(weights[0], weights[2])


def test_learned_scalars_norms_and_biases_have_no_weight_decay(tmp_path: Path) -> None:
    from langevin.data import prepare

    config = small(tmp_path, mixer="heat(t='adaptive')+drift(kind='gate')")
    model = build(config, prepare(config.data, "bytes", progress=False))
    (adamw,) = optim.optimizers(model, config)
    free = {id(p) for p in adamw.param_groups[1]["params"]}
    assert adamw.param_groups[1]["weight_decay"] == 0
    for module in model.modules():
        if isinstance(module, Scalars):
            assert {id(p) for p in module.parameters()} <= free
    everything = [id(p) for group in adamw.param_groups for p in group["params"]]
    assert sorted(everything) == sorted(id(p) for p in model.parameters())
    adamw, muon = optim.optimizers(model, replace(config, optimizer="muon"))
    both = [id(p) for o in (adamw, muon) for group in o.param_groups for p in group["params"]]
    assert sorted(both) == sorted(everything)


def test_muon_trains(tmp_path: Path) -> None:
    config = small(tmp_path, optimizer="muon", steps=20, mixer="softmax", dropout=0.0)
    run, _ = train(config, tmp_path / "run", quiet=True)
    losses = [row["loss"] for row in run.metrics("valid")]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("schedule", "middle", "end"), [("cosine", 0.55, 0.1), ("wsd", 1.0, 0.1), ("constant", 1.0, 1.0)]
)
def test_schedules_rise_hold_and_fall(schedule: Any, middle: float, end: float) -> None:
    config = TrainConfig(schedule=schedule, warmup=0.1)
    rates = [optim.factor(step, 1000, config) for step in range(1000)]
    assert rates[0] == pytest.approx(0.01)
    assert max(rates) == pytest.approx(1.0)
    assert rates[549] == pytest.approx(middle, abs=0.01)
    assert rates[-1] == pytest.approx(end, abs=0.01)


def test_steps_that_are_not_finite_are_skipped_counted_and_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = loop.Trainer.loss
    bad = {"from": 3, "to": 4}

    def loss(self: loop.Trainer, batch: Any) -> Any:
        value, count = whole(self, batch)
        broken = self.model.training and bad["from"] <= self.state.step < bad["to"]
        return value * float("nan") if broken else value, count

    monkeypatch.setattr(loop.Trainer, "loss", loss)
    run, _ = train(small(tmp_path), tmp_path / "one", quiet=True)
    assert run.metrics("train")[-1]["skipped_steps"] == 1
    assert 0 < run.metrics("train")[-1]["loss"] < 10
    bad["to"] = 100
    with pytest.raises(WorkError, match="not finite for 5 steps, the last being step 7"):
        train(small(tmp_path, max_bad_steps=5), tmp_path / "many", quiet=True)


def test_averaged_weights_are_what_is_evaluated_and_kept(tmp_path: Path) -> None:
    config = small(tmp_path, ema=0.5, steps=8, eval_every=8)
    train(config, tmp_path / "run", quiet=True)
    from safetensors.torch import load_file

    folder = tmp_path / "run" / "checkpoints" / "step-8"
    average, own = load_file(folder / "average.safetensors"), load_file(folder / "weights.safetensors")
    kept = dict(langevin.load(tmp_path / "run").model.named_parameters())
    name = "model.blocks.0.mlp.up.weight"
    assert torch.equal(kept[name], average[name])
    assert not torch.equal(average[name], own[name])


def test_minutes_become_steps_that_a_resumed_run_keeps(tmp_path: Path) -> None:
    run, _ = train(small(tmp_path, steps=None, minutes=0.01), tmp_path / "run", quiet=True)
    states = [json.loads(p.read_text()) for p in run.path.glob("checkpoints/*/state.json")]
    last = max(states, key=lambda state: state["step"])
    assert last["step"] == last["total"] >= 1
    train(run.config, run.path, resume=True, quiet=True)
    assert max(row["step"] for row in run.metrics()) == last["total"]


def test_an_estimate_counts_the_parameters_of_the_model(tmp_path: Path) -> None:
    from langevin.data import prepare

    config = small(tmp_path)
    model = build(config, prepare(config.data, "bytes", progress=False))
    assert estimate(config)["parameters"] == sum(p.numel() for p in model.parameters())


def test_train_evaluate_generate_and_plot_as_a_user_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(tmp_path, steps=8)
    settings = tmp_path / "settings.yaml"
    settings.write_text(config.as_yaml())
    run = str(tmp_path / "run")
    assert cli.main(["train", "--config", str(settings), "--mixer", "ssmax", "--out", run]) == 0
    assert langevin.load(run).config.mixer == "ssmax"
    assert cli.main(["evaluate", run, "--json"]) == 0
    result = json.loads(capsys.readouterr().out.partition("{")[2].join(["{", ""]))
    assert result["likelihood"]["nll"]["value"] > 0
    assert result["learned"][0]["name"] == "s"
    assert cli.main(["evaluate", run]) == 0
    assert "95 % interval" in capsys.readouterr().out
    assert cli.main(["generate", run, "--prompt", "Ann had", "--tokens", "5", "--samples", "2"]) == 0
    samples = (Path(run) / "samples" / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"][:7] for line in samples] == ["Ann had"] * 2
    for what in ("curves", "reliability", "attention", "times"):
        assert cli.main(["plot", what, run]) == 0
        assert (Path(run) / "figures" / f"{what}.png").stat().st_size > 5000
    assert cli.main(["plot", "curves", run, "--out", str(tmp_path / "c.svg")]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "--data", "storys"], "Did you mean 'stories'"),
        (["train", "--data", "missing.txt"], "missing.txt"),
        (["train", "--steps", "5", "--tokens", "5"], "both set a budget"),
        (["train", "--heads", "3"], "3 heads do not divide"),
        (["train", "--lr", "-1"], "lr=-1.0 must be positive"),
        (["train", "--config", "none.yaml"], "none.yaml cannot be read"),
        (["train", "--seeds", "x"], "names no seeds"),
        (["evaluate", "nowhere"], "is not a run folder"),
        (["generate", "nowhere"], "is not a run folder"),
        (["plot", "curves"], "no folder came"),
        (["plot", "curves", "nowhere"], "is not a run folder"),
    ],
)
def test_a_wrong_command_is_refused_in_two_lines(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert said in "\n".join(lines)
    assert len(lines) <= 2


def test_a_text_shorter_than_the_context_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a few words only\n" * 3)
    with pytest.raises(UsageError, match="too few for a context"):
        train(TrainConfig(data=str(tmp_path / "short.txt"), tokenizer="bytes"), tmp_path / "x", quiet=True)


def test_evaluation_refuses_another_text(tmp_path: Path) -> None:
    from langevin.evaluation.runs import evaluate

    config = small(tmp_path, steps=4)
    run, _ = train(config, tmp_path / "run", quiet=True)
    text = tmp_path / "text.txt"
    text.write_text(text.read_text().replace("Ann", "Eve"))
    with pytest.raises(UsageError, match="is not what"):
        evaluate(langevin.load(run.path))


def test_an_unknown_setting_in_a_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("layer: 3\n")
    with pytest.raises(UsageError, match="Did you mean 'layers'"):
        TrainConfig.read(file)


def test_every_evaluated_model_is_kept_where_asked_for(tmp_path: Path) -> None:
    run, _ = train(small(tmp_path, keep_evaluated=True, ema=0.5), tmp_path / "run", quiet=True)
    kept = sorted(p.name for p in (run.path / "evaluated").iterdir())
    assert kept == ["step-12", "step-4", "step-8"]
    best = min(run.metrics("valid"), key=lambda row: row["loss"])["step"]
    weights = [
        (folder / "model.safetensors").read_bytes()
        for folder in (run.path / "model", run.path / "evaluated" / f"step-{best}")
    ]
    assert weights[0] == weights[1]


def test_the_first_tokens_alone_are_trained_on_where_asked_for(tmp_path: Path) -> None:
    from langevin.data import prepare

    config = small(tmp_path, train_tokens=100)
    corpus = prepare(config.data, "bytes", progress=False)
    trainer = loop.Trainer(config, build(config, corpus), corpus, tmp_path)
    starts = [int(s) for step in range(50) for s in trainer.feed.windows(step)]
    assert 0 <= min(starts) <= max(starts) < 100


def test_the_width_of_the_mlp_is_what_was_asked_for(tmp_path: Path) -> None:
    from langevin.data import prepare

    config = small(tmp_path, mlp_width=24)
    model = build(config, prepare(config.data, "bytes", progress=False))
    assert model.model.blocks[0].mlp.up.weight.shape == (24, 16)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains_with_weights_in_float32(precision: Any, tmp_path: Path) -> None:
    config = small(tmp_path, precision=precision, steps=40, lr=5e-3, dropout=0.0, mixer="softmax")
    run, _ = train(config, tmp_path / "run", quiet=True)
    losses = [row["loss"] for row in run.metrics("valid")]
    assert losses[-1] < losses[0] - 0.1
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}


def test_a_tracker_that_is_not_here_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match="needs the package wandb"):
        train(small(tmp_path, track="wandb"), tmp_path / "run", quiet=True)
    with pytest.raises(UsageError, match="unknown tracker 'tensorbord'"):
        train(small(tmp_path, track="tensorbord"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_text_that_lives_on_the_device_trains_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(tmp_path, steps=6, train_tokens=1000)
    train(config, tmp_path / "there", quiet=True)
    monkeypatch.setattr(feed, "fits", lambda device, size: True)
    train(config, tmp_path / "here", quiet=True)
    assert fingerprint(tmp_path / "there", 6) == fingerprint(tmp_path / "here", 6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"clip": 0.0},
        {"max_bad_steps": 0},
        {"muon_lr": -1.0},
        {"weight_decay": -5.0},
        {"beta2": 1.0},
        {"seed": -1},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        small(tmp_path, **wrong)


def test_fewer_training_tokens_than_a_context_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="train_tokens=10 are too few"):
        train(small(tmp_path, train_tokens=10), tmp_path / "run", quiet=True)


def test_a_validation_text_shorter_than_the_context_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="valid tokens, too few for a context of 400"):
        train(small(tmp_path, context=400), tmp_path / "run", quiet=True)


def test_on_a_cpu_no_text_is_copied_and_on_a_gpu_only_what_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from langevin.data import prepare

    config = small(tmp_path, train_tokens=100, eval_tokens=64)
    corpus = prepare(config.data, "bytes", progress=False)
    assert loop.Trainer(config, build(config, corpus), corpus, tmp_path).feed.train is None
    monkeypatch.setattr(feed, "fits", lambda device, size: True)
    fed = loop.Trainer(config, build(config, corpus), corpus, tmp_path).feed
    assert fed.train.tolist() == corpus.tokens("train")[:100].tolist()
    assert fed.train.untyped_storage().nbytes() == 400


def test_a_validation_loss_that_is_not_a_number_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop.Trainer, "valid_loss", lambda self: float("nan"))
    with pytest.raises(WorkError, match="the validation loss at step 4 is nan"):
        train(small(tmp_path), tmp_path / "run", quiet=True)


def test_a_run_that_ends_earlier_than_planned_logs_its_last_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop.Pace, "total", lambda self, step, *spent: 4)
    run, _ = train(small(tmp_path, steps=None, minutes=1.0), tmp_path / "run", quiet=True)
    assert run.metrics("train")[-1]["step"] == run.metrics("valid")[-1]["step"] == 4


@pytest.mark.slow  # compiles C++
def test_a_compiled_loss_is_the_loss(tmp_path: Path) -> None:
    plain, _ = train(small(tmp_path, accumulate=2), tmp_path / "plain", quiet=True)
    compiled, _ = train(small(tmp_path, accumulate=2, compile="loss"), tmp_path / "compiled", quiet=True)
    for ours, theirs in zip(compiled.metrics("valid"), plain.metrics("valid"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)


def test_a_tokenizer_that_writes_folders_is_kept_whole(tmp_path: Path) -> None:
    class Nested:
        saved = 0

        def save_pretrained(self, folder: str) -> None:
            self.saved += 1
            (Path(folder) / "templates").mkdir()
            (Path(folder) / "templates" / "chat.jinja").write_text("hello")
            (Path(folder) / "tokenizer.json").write_text("{}")

    tokenizer = Nested()
    trainer: Any = SimpleNamespace(data=SimpleNamespace(tokenizer=tokenizer))
    progress = Progress(tmp_path, quiet=True)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        progress._put_tokenizer(trainer, tmp_path / name)
        assert (tmp_path / name / "templates" / "chat.jinja").read_text() == "hello"
        assert (tmp_path / name / "tokenizer.json").read_text() == "{}"
    assert tokenizer.saved == 1


def test_without_a_compiler_nothing_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    assert resolved(TrainConfig(precision="fp32"), "cuda").compile == "off"
    for device in ("cuda", "cpu"):
        with pytest.raises(UsageError, match=r"needs gcc or g\+\+, which is not here\nUse --compile off"):
            resolved(TrainConfig(precision="fp32", compile="loss"), device)
    compiler = tmp_path / "gcc"
    compiler.touch()
    compiler.chmod(0o755)
    assert resolved(TrainConfig(precision="fp32"), "cuda").compile == "on"
    with pytest.raises(UsageError):
        resolved(TrainConfig(precision="fp32", compile="loss"), "cpu")
