"""A classifier from a table to predictions: training, resuming, evaluating, predicting."""

from __future__ import annotations

import csv
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import langevin
from langevin import cli
from langevin.cli import predict
from langevin.errors import UsageError
from langevin.evaluation.runs import measured
from langevin.objectives.classify import temperature_of
from langevin.settings import TrainConfig
from langevin.studies import work
from langevin.tasks import TASKS
from training.small_run import dying_at_step, fingerprint, train_in_a_process

pytestmark = pytest.mark.filterwarnings("ignore:.*longer than the context")
CLASSES = 37
SHAPE: dict[str, Any] = {
    "mixer": "neighbor",
    "layers": 1,
    "width": 32,
    "heads": 2,
    "context": 32,
    "batch": 16,
}
SHAPE |= {"device": "cpu", "precision": "fp32", "compile": "off", "lr": 1e-2, "tokenizer": "words"}
TASK = "classify(text_column='review', label_column='stars')"


@pytest.fixture(scope="module")
def my_csv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """37 classes that a word tells, with quotes, emoji, empty rows and a row of 60,000 words."""
    path, draw = tmp_path_factory.mktemp("data") / "my.csv", random.Random(0)
    with open(path, "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "review", "stars"])
        for i in range(CLASSES * 16):
            noise = " ".join(draw.choice(["so", "it", "goes", "😀"]) for _ in range(draw.randrange(1, 12)))
            text = f'{noise} "word{i % CLASSES}", {i} 😀\nword{i % CLASSES}' if i % 90 else ""
            rows.writerow([i, "word3 " * 60_000 if i == 40 else text, f"class {i % CLASSES}"])
    return path


def config(my_csv: Path, **changes: Any) -> TrainConfig:
    return TrainConfig(**{**SHAPE, "task": TASK, "data": str(my_csv), "epochs": 8, **changes})


@pytest.fixture(scope="module")
def run(my_csv: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return langevin.train(config(my_csv), tmp_path_factory.mktemp("runs") / "run", quiet=True)[0]


def test_it_learns_and_says_how_well(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evaluate", str(run.path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    rows = {row["metric"]: row for row in told["rows"] if not row["at"]}
    assert rows["accuracy"]["value"] > 0.8
    assert rows["accuracy"]["n"] == len(told["examples"])
    assert rows["temperature"]["value"] == run.model.config.temperature != 1
    assert len(told["mistakes"]) <= 10
    assert cli.main(["evaluate", str(run.path)]) == 0
    shown = capsys.readouterr().out
    for part in ("macro-F1", "By class", "class 36", "Most often confused"):
        assert part in shown
    assert ("The surest mistakes" in shown) == bool(told["mistakes"])


def test_the_command_trains_on_a_table(
    my_csv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--text-column", "review", "--label-column", "stars", "--mixer", "neighbor", "--epochs", "0.5"]
    flags += ["--layers", "1", "--width", "16", "--heads", "2", "--device", "cpu"]
    assert (
        cli.main(
            ["train", "--task", "classify", "--data", str(my_csv), *flags, "--out", str(tmp_path / "x")]
        )
        == 0
    )
    shown = capsys.readouterr()
    assert "on valid" in shown.out
    assert "nats per example" in shown.out
    assert "langevin predict" in shown.out
    assert "rows without a text" in shown.err
    rows = [json.loads(line) for line in (tmp_path / "x" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["tokens"] == rows[-1]["step"] * 32
    assert not (tmp_path / "x" / "evaluation-test.json").exists()  # test is for evaluate


def test_killed_and_resumed_it_ends_with_the_same_bits(my_csv: Path, tmp_path: Path) -> None:
    one = config(my_csv, epochs=None, steps=12, eval_every=4, checkpoint_every=4, dropout=0.1)
    whole, _ = langevin.train(one, tmp_path / "whole", quiet=True)
    (tmp_path / "settings.yaml").write_text(one.as_yaml())
    assert train_in_a_process(tmp_path / "settings.yaml", tmp_path / "killed", dying_at_step(6)) != 0
    assert train_in_a_process(tmp_path / "settings.yaml", tmp_path / "killed") == 0
    assert fingerprint(whole.path, 12) == fingerprint(tmp_path / "killed", 12)


def test_a_batch_is_a_function_of_seed_and_step(my_csv: Path) -> None:
    one = config(my_csv)
    task = TASKS.parse(TASK)
    texts = [task.prepare(one) for _ in range(2)]
    shapes = set()
    for step in (30, 0, 7, 91):
        a, b = (task.batch(data, one, step) for data in texts)
        assert all((a[name] == b[name]).all() for name in a)
        shapes.add(a["input_ids"].shape)
    other = task.batch(texts[0], replace(one, seed=1), 7)
    assert not (other["labels"] == task.batch(texts[0], one, 7)["labels"]).all()
    lengths = {task.batch(texts[0], one, step)["input_ids"].shape[1] for step in range(60)}
    assert 1 < len(lengths) <= 7
    feed = task.feed(texts[0], one, torch.device("cpu"), lambda x: x)
    feed.put(feed.widest)
    assert feed.shape[0][1] == max(lengths)


def test_shuffled_labels_are_at_chance(tmp_path: Path) -> None:
    draw = random.Random(1)
    rows = [(f"word{draw.randrange(9)} word{draw.randrange(9)} {i}", draw.randrange(2)) for i in range(900)]
    path = tmp_path / "shuffled.csv"
    path.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    run, _ = langevin.train(config(path, task="classify", epochs=3), tmp_path / "run", quiet=True)
    (row,) = [r for r in measured(run, run.model)["rows"] if r["metric"] == "accuracy"]
    assert row["low"] < 0.5 < row["high"]


def test_predictions_are_those_of_evaluation_and_go_on_where_they_stopped(
    run: Any,
    my_csv: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(predict, "AT_ONCE", 100)
    command = ["predict", str(run.path), "--file", str(my_csv), "--out"]
    assert cli.main([*command, str(tmp_path / "whole.csv")]) == 0
    whole = (tmp_path / "whole.csv").read_text()
    rows = list(csv.DictReader(whole.splitlines()))
    assert len(rows) == CLASSES * 16
    assert rows[90]["label"] == ""  # it has no text
    for row in (row for row in rows if row["label"]):
        shares = [float(row[f"class {c}"]) for c in range(CLASSES)]
        assert sum(shares) == pytest.approx(1, abs=1e-4)
        assert float(row["probability"]) == max(shares)
    load, calls = langevin.evaluation.classes.classifier, []

    def dying(*arguments: Any) -> Any:
        classify, names = load(*arguments)

        def some(texts: list[str]) -> Any:
            calls.append(len(texts))
            if len(calls) == 3:
                raise KeyboardInterrupt
            return classify(texts)

        return some, names

    monkeypatch.setattr(langevin.evaluation.classes, "classifier", dying)
    assert cli.main([*command, str(tmp_path / "again.csv")]) == 130
    assert not (tmp_path / "again.csv").exists()
    (part,) = tmp_path.glob(".again.csv.*.part")
    part.write_bytes(part.read_bytes()[:-30])  # a torn line
    assert cli.main([*command, str(tmp_path / "again.csv")]) == 0
    assert (tmp_path / "again.csv").read_text() == whole
    rest = [len([row for row in rows[at : at + 100] if row["label"]]) for at in range(100, len(rows), 100)]
    assert calls[3:] == rest  # of the torn hundred no row is kept: batches are what they were
    data = run.task.prepare(run.config)
    (text,) = data.texts("test")[:1]
    capsys.readouterr()
    assert cli.main(["predict", str(run.path), "--text", text, "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    right = run.task.measure(run, run.model, "test", data=data, resamples=10)[1]["examples"][0]
    assert (told["label"] == data.classes[data.labels("test")[0]]) == bool(right)


def test_rows_that_were_written_are_read_again_whatever_their_class_is_called(tmp_path: Path) -> None:
    rows = [["row", "label"], ["1", "a\u2028b\x85"], ["2", 'c\n"d"'], ["3", "e"]]
    with open(tmp_path / "part", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    assert predict._written(tmp_path / "part") == rows
    (tmp_path / "part").write_bytes((tmp_path / "part").read_bytes()[:-2])  # torn
    assert predict._written(tmp_path / "part") == rows[:-1]


def test_what_cannot_be_predicted_is_told(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.csv").write_text("other\nx\n")
    there = tmp_path / "there.csv"
    there.write_text("")
    for flags, says in (
        (["--file", str(tmp_path / "in.csv"), "--out", str(tmp_path / "o.csv")], "it has 'other'"),
        (["--file", str(tmp_path / "in.csv"), "--out", str(there)], "is there already"),
        (["--file", str(tmp_path / "no.csv"), "--out", str(tmp_path / "o.csv")], "no such file"),
        (["--file", "-", "--out", str(tmp_path / "o.csv")], "--file wants a file"),
        (["--file", "/dev/null", "--out", str(tmp_path / "o.csv")], "--file wants a file"),
        (["--file", str(tmp_path / "in.csv"), "--out", str(tmp_path / "o.csv"), "--json"], "no JSON"),
        (["--text", ""], "text 1 of 1 is empty"),
        ([], "texts, images or a file"),
        (["--text", "a", "--out", "b.csv"], "go together"),
    ):
        assert cli.main(["predict", str(run.path), *flags]) == 2
        assert says in capsys.readouterr().err


def test_it_starts_from_an_encoder(my_csv: Path, tmp_path: Path) -> None:
    small: dict[str, Any] = {**SHAPE, "tokenizer": "bytes", "steps": 2, "mixer": "softmax"}
    (tmp_path / "text.txt").write_text("once upon a time\n" * 300)
    masked, _ = langevin.train(
        TrainConfig(**small, data=str(tmp_path / "text.txt"), objective="masked"),
        tmp_path / "masked",
        quiet=True,
    )
    settings: dict[str, Any] = {"data": str(my_csv), "task": TASK, "init": str(masked.path)}
    settings |= {"steps": 0, "device": "cpu"}
    run, _ = langevin.train(TrainConfig(**settings), tmp_path / "run", quiet=True)
    assert run.config.context == 32
    theirs, ours = masked.model.model.state_dict(), run.model.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    back, _ = langevin.train(
        TrainConfig(**small, data=str(tmp_path / "text.txt")), tmp_path / "ar", quiet=True
    )
    with pytest.raises(UsageError, match="no langevin model that sees both sides"):
        langevin.train(TrainConfig(**{**settings, "init": str(back.path)}), tmp_path / "no", quiet=True)


def test_it_starts_from_a_classifier_of_other_classes(
    my_csv: Path, run: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [f"{'good' if i % 2 else 'bad'} thing number {i},{'yes' if i % 2 else 'no'}" for i in range(60)]
    (tmp_path / "two.csv").write_text("\n".join(["text,label", *lines]))
    settings: dict[str, Any] = {"data": str(tmp_path / "two.csv"), "task": "classify", "steps": 0}
    settings |= {"init": str(run.path), "device": "cpu"}
    mixer = run.config.mixer
    found, _ = langevin.train(TrainConfig(**settings, mixer=mixer), tmp_path / "found", quiet=True)
    assert found.model.config.num_labels == 2
    theirs, ours = run.model.model.state_dict(), found.model.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    other = "neighbor" if mixer == "softmax" else "softmax"
    with pytest.raises(UsageError, match="cannot go on from its weights") as refused:
        langevin.train(TrainConfig(**settings, mixer=other), tmp_path / "no", quiet=True)
    assert repr(mixer) in str(refused.value.remedy)
    assert "LOAD REPORT" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("own", "other", "remedy"),
    [
        ("neighbor; softmax", "softmax", "Leave --init out."),
        ("neighbor(kind='content', iters=1)", "neighbor(kind='content', hops='dilated')", "Give --mixer"),
    ],
    ids=["several mixers", "other shapes"],
)
def test_a_mixer_that_cannot_take_the_weights_is_named_as_the_cause(
    my_csv: Path, tmp_path: Path, own: str, other: str, remedy: str
) -> None:
    began, _ = langevin.train(
        config(my_csv, mixer=own, layers=2, steps=0, epochs=None), tmp_path / "a", quiet=True
    )
    settings: dict[str, Any] = {"data": str(my_csv), "task": TASK, "steps": 0, "device": "cpu"}
    with pytest.raises(UsageError, match="cannot go on from its weights") as refused:
        langevin.train(
            TrainConfig(**settings, init=str(began.path), mixer=other), tmp_path / "b", quiet=True
        )
    assert refused.value.remedy.startswith(remedy)


def test_a_bag_of_ngrams_refuses_what_needs_layers(my_csv: Path, run: Any, tmp_path: Path) -> None:
    bag = {"objective": "classify(pooling='ngrams')", "steps": 2, "epochs": None}
    found, _ = langevin.train(config(my_csv, **bag), tmp_path / "bag", quiet=True)
    with torch.no_grad(), pytest.raises(UsageError, match="no attention weights"):
        found.model(torch.zeros(1, 2, dtype=torch.long), output_attentions=True)
    default = {k: getattr(TrainConfig(), k) for k in ("layers", "width", "heads", "tokenizer")}
    for changes, says in (
        ({**bag, "checkpointing": True}, "no layers for --checkpointing"),
        ({**bag, **default, "init": str(run.path)}, "no layers for --init"),
        ({**default, "init": str(found.path)}, "without layers to start from"),
    ):
        with pytest.raises(UsageError, match=says):
            langevin.train(config(my_csv, **changes), tmp_path / "refused", quiet=True)


@pytest.mark.parametrize(
    ("family", "mixer"), [("Bert", "softmax"), ("Roberta", "ssmax"), ("DistilBert", "sigmoid")]
)
def test_it_fine_tunes_an_encoder_of_transformers(
    family: str, mixer: str, run: Any, my_csv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, folder = run.tokenizer, tmp_path / "encoder"
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    if family == "DistilBert":
        shape = {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 64}
    shape |= {"vocab_size": len(tokenizer), "pad_token_id": 1, "max_position_embeddings": 34}
    large = {"initializer_range": 0.3}  # it learns sooner
    theirs = getattr(transformers, f"{family}ForMaskedLM")(
        getattr(transformers, f"{family}Config")(**shape, **large)
    )
    for saved in (theirs, tokenizer):
        saved.save_pretrained(folder)
    same: dict[str, Any] = {"data": str(my_csv), "task": TASK, "init": str(folder), "device": "cpu"}
    same["mixer"] = mixer
    start, _ = langevin.train(TrainConfig(**same, steps=0), tmp_path / "start", quiet=True)
    assert type(start.model).__name__ == f"{family}ForSequenceClassification"
    assert start.config.context == (32 if family == "Roberta" else 34)
    ours = dict(start.model.named_parameters())
    kept = {name: p for name, p in theirs.named_parameters() if name in ours}
    assert len(kept) >= 6
    assert all(torch.equal(ours[name], p) for name, p in kept.items())
    tuned, _ = langevin.train(
        TrainConfig(**same, epochs=3, batch=16, lr=1e-2), tmp_path / "tuned", quiet=True
    )
    first, *_, last = (row["loss"] for row in tuned.metrics("valid"))
    assert last < first - 0.1
    found = {row["metric"]: row["value"] for row in measured(tuned, tuned.model, "valid")["rows"]}
    assert found["temperature"] == temperature_of(tuned.model) != 1
    assert cli.main(["predict", str(tuned.path), "--json", "--text", "so word7 word7"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    ids = tokenizer("so word7 word7", return_tensors="pt").input_ids
    logits = tuned.model(ids).logits[0] / temperature_of(tuned.model)
    assert logits.softmax(-1).max().item() == pytest.approx(max(told["probabilities"].values()), abs=1e-5)


def test_an_encoder_that_cannot_be_used_is_refused(run: Any, my_csv: Path, tmp_path: Path) -> None:
    folder, size = tmp_path / "vit", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.ViTModel(transformers.ViTConfig(**size, intermediate_size=64)).save_pretrained(folder)
    run.tokenizer.save_pretrained(folder)
    settings = TrainConfig(data=str(my_csv), task=TASK, init=str(folder), steps=0, device="cpu")
    with pytest.raises(UsageError, match="AutoModelForSequenceClassification has no class for ViTConfig"):
        langevin.train(settings, tmp_path / "no", quiet=True)


def test_compare_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "ROUNDS", 2)
    monkeypatch.setattr(work, "SECONDS", 0.005)
    path, out = tmp_path / "my.csv", tmp_path / "cmp"
    path.write_text(
        "text,label\n" + "".join(f"word{i % 3} {i},{(i + (i % 7 == 0)) % 3}\n" for i in range(120))
    )
    given = {**SHAPE, "task": "classify", "data": path, "epochs": 2, "seeds": "0,1", "workers": 0}
    given["out"] = out
    flags = [word for k, v in given.items() if k != "mixer" for word in (f"--{k}", str(v))]
    bag = "bag=softmax, objective=classify(pooling='ngrams'), lr=0.02"
    assert cli.main(["compare", "softmax", "neighbor", bag, *flags, "--quiet"]) == 0
    results = json.loads((out / "results.json").read_text())
    (part,) = results["parts"]
    costs = {arm["name"]: {row["metric"]: row["value"] for row in arm["costs"]} for arm in part["arms"]}
    assert costs["bag"]["flops_per_token"] == 6 * 2 * 3
    assert costs["bag"]["parameters"] % 3 == 0
    assert results["metrics"][0]["name"] == "accuracy"
    assert results["unit"] == "examples"
    assert part["settings"]["tokens"] == 2 * 96
    page = (out / "report.html").read_text()
    for title in ("Calibration", "F1 by class", "confusion by class and predicted", "The surest mistakes"):
        assert title in page
    assert "examples/s" in page
    runs = [str(out / arm / f"seed-{seed}") for arm in ("softmax", "neighbor") for seed in (0, 1)]
    assert cli.main(["report", *runs, "--out", str(tmp_path / "report")]) == 0
