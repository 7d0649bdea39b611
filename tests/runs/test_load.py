"""What is loaded is the model that was trained, or nothing is."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from harm import changed, cut, other_tensors
from safetensors.torch import load_file

from langevin.cli import main
from langevin.errors import UsageError, WorkError
from langevin.runs import files, load


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    return lambda model: other_tensors(model / "model.safetensors", change)


def config(**values: Any) -> Callable[[Path], None]:
    return lambda model: changed(model / "config.json", **values)


def tokenizer(**values: Any) -> Callable[[Path], None]:
    return lambda model: changed(model / "tokenizer_config.json", **values)


def content(name: str, data: bytes | None) -> Callable[[Path], None]:
    """Another file in its place; None: none."""

    def harm(model: Path) -> None:
        (model / name).unlink()
        if data is not None:
            (model / name).write_bytes(data)

    return harm


EMBED, SCALAR = "model.embed.weight", "model.blocks.1.attention.langevin.scalars.s"

HARMS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a weight is missing": (
        weights(lambda t: {k: v for k, v in t.items() if k != EMBED}),
        "missing keys, the first being lm_head.weight",
    ),
    "a scalar is missing": (weights(lambda t: {k: v for k, v in t.items() if k != SCALAR}), SCALAR),
    "a weight too much": (weights(lambda t: {**t, "model.extra": torch.zeros(2)}), "model.extra"),
    "a layer too much": (
        weights(lambda t: {**t, **{k.replace("s.1.", "s.2."): v.clone() for k, v in t.items()}}),
        "model.blocks.2",
    ),
    "a weight of another shape": (weights(lambda t: t.update({SCALAR: torch.ones(3)})), SCALAR),
    "a weight with one row": (weights(lambda t: t.update({EMBED: t[EMBED][:1]})), "vocab_size"),
    "nan": (weights(lambda t: t.update({SCALAR: t[SCALAR] * torch.nan})), f"{SCALAR} is not finite"),
    "infinity": (weights(lambda t: t.update({EMBED: t[EMBED] / 0})), "not finite"),
    "no weights": (content("model.safetensors", None), "model.safetensors|damaged"),
    "empty weights": (content("model.safetensors", b""), "Safetensor"),
    "cut weights": (lambda model: cut(model / "model.safetensors"), "Safetensor"),
    "random weights": (content("model.safetensors", bytes(range(256)) * 9), "Safetensor"),
    "a pickle of weights": (content("model.safetensors", pickle.dumps({"a": 1})), "Safetensor"),
    "no config": (content("config.json", None), "there is no"),
    "empty config": (content("config.json", b""), "not JSON"),
    "an empty table": (content("config.json", b"{}"), "has no model_type"),
    "a list as config": (content("config.json", b"[1]"), "not a table"),
    "fewer layers": (config(num_hidden_layers=1), "num_hidden_layers=1, not 2"),
    "more layers": (config(num_hidden_layers=10**9), "num_hidden_layers"),
    "no heads": (config(num_attention_heads=None), "num_attention_heads=4, not 2"),
    "other heads": (config(num_attention_heads=4), "num_attention_heads=4, not 2"),
    "another width": (config(hidden_size=32), "hidden_size=32, not 16"),
    "no width": (config(hidden_size="x"), "hidden_size"),
    "another vocabulary": (config(vocab_size=300), "vocab_size=300, not 257"),
    "a huge vocabulary": (config(vocab_size=10**12), "vocab_size"),
    "another mixer": (config(mixer="heat(t=0.28)"), "mixer"),
    "an unknown mixer": (config(mixer="nosuch"), "mixer"),
    "other positions": (config(positions="none"), "positions"),
    "another class": (config(architectures=["GPT2LMHeadModel"]), "architectures"),
    "a class without a head": (config(architectures=["LangevinModel"]), "architectures"),
    "no class": (config(architectures=5), "architectures=5"),
    "another kind": (config(model_type="gpt2"), "model_type"),
    "an unknown kind": (config(model_type="nosuch"), "model_type"),
    "no kind": (config(model_type=7), "model_type is 7"),
    "not UTF-8": (content("config.json", b"\xff\xfe"), "not UTF-8"),
    "damaged sampling settings": (content("generation_config.json", b"[1]"), "cannot be read"),
}

TOKENIZERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no tokenizer": (content("tokenizer.json", None), "."),
    "an empty table": (content("tokenizer.json", b"{}"), "."),
    "a cut tokenizer": (lambda model: cut(model / "tokenizer.json"), "."),
    "no settings": (content("tokenizer_config.json", None), "end-of-text"),
    "a list as settings": (content("tokenizer_config.json", b"[1]"), "."),
    "no end of text": (tokenizer(eos_token=None), "end-of-text"),
    "an unknown end of text": (tokenizer(eos_token="<nope>"), "257|end-of-text"),
    "a number as end of text": (tokenizer(eos_token=5), "."),
    "more tokens than the model has": (
        lambda model: (model / "added_tokens.json").write_text('{"foo": 999}') and None,
        ".",
    ),
}


def refused(run: Path, get: Callable[[Any], Any], said: str) -> None:
    with pytest.raises((UsageError, WorkError), match=said) as caught:
        get(load(run))
    assert len(str(caught.value).splitlines()) == 2, str(caught.value)
    assert len(caught.value.cause) < 400


@pytest.mark.parametrize("name", HARMS)
def test_a_model_that_is_not_the_one_that_was_trained_is_refused(name: str, run: Path) -> None:
    harm, said = HARMS[name]
    harm(run / "model")
    refused(run, lambda found: found.model, said)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_is_not_whole_is_refused(name: str, run: Path) -> None:
    harm, said = TOKENIZERS[name]
    harm(run / "model")
    refused(run, lambda found: found.tokenizer, said)


def test_a_whole_run_is_loaded_quietly_in_float32_with_its_own_weights(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    changed(run / "model" / "config.json", dtype="bfloat16")
    (run / "notes.txt").write_text("stray files and copies are no harm")
    (run / "model" / "model (copy).safetensors").write_bytes(b"")
    found = load(run)
    assert found.config.layers == 2
    assert not found.model.training
    stored = load_file(run / "model" / "model.safetensors")
    loaded = dict(found.model.named_parameters())
    assert all(torch.equal(x, loaded[name]) for name, x in stored.items())
    assert found.tokenizer("a").input_ids == [97]
    assert [row["step"] for row in found.metrics("valid")] == [2, 4, 6]
    assert found.environment["step"] == 0
    assert set(found.environment["data"]["splits"]) == {"train", "valid", "test"}
    assert capfd.readouterr() == ("", "")


def test_neither_a_pickle_nor_code_beside_the_model_is_ever_run(run: Path, tmp_path: Path) -> None:
    """Weights of torch.save, a model's own code and a tokenizer's own code, each of which leaves a mark."""
    marks = [tmp_path / f"mark-{i}" for i in range(3)]

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (marks[0],))

    for i, (module, names) in enumerate(
        (("modeling_x", "AutoConfig AutoModelForCausalLM"), ("tok_x", "AutoTokenizer")), 1
    ):
        (run / "model" / f"{module}.py").write_text(f"open({str(marks[i])!r}, 'w')\nclass X: pass\n")
        file = "config.json" if i == 1 else "tokenizer_config.json"
        changed(run / "model" / file, auto_map=dict.fromkeys(names.split(), f"{module}.X"))
    found = load(run)
    assert found.model is not None
    assert found.tokenizer("a").input_ids == [97]
    (run / "model" / "model.safetensors").rename(run / "model" / "old")
    (run / "model" / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    refused(run, lambda found: found.model, ".")
    assert not any(mark.exists() for mark in marks)


def _put(folder: Path, stored: dict[str, bytes]) -> None:
    for name, data in stored.items():
        (folder / name).write_bytes(data)


@pytest.mark.parametrize("dies", [False, True])
def test_a_model_that_is_replaced_while_it_is_loaded_is_loaded_again(
    dies: bool, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is given is one version, with its own hash, whether the other reading failed or not."""
    read = import_module("langevin.runs.load")  # the name means the function
    whole, reads = read.read_model, []

    def replacing(folder: Path, config: Any) -> Any:
        model = whole(folder, config)
        reads.append(folder)
        if len(reads) < 3:
            stored = {path.name: path.read_bytes() for path in folder.iterdir()}
            files.write_folder(run / "model", lambda fresh: _put(fresh, stored))
            weights(lambda t: {name: x + 1 for name, x in t.items()})(run / "model")
            if dies:
                raise WorkError("half of it was gone")
        return model

    monkeypatch.setattr(read, "read_model", replacing)
    found = load(run)
    loaded = dict(found.model.named_parameters())
    stored = load_file(run / "model" / "model.safetensors")
    assert all(torch.equal(p, stored[name]) for name, p in loaded.items())
    assert found.model_sha256 == files.sha256(run / "model" / "model.safetensors")
    assert len(reads) == 3


@pytest.mark.parametrize("average", [False, True])
def test_a_checkpoint_that_was_kept_is_loaded_with_the_weights_it_is_judged_by(
    average: bool, run: Path
) -> None:
    place = run / "checkpoints" / "step-6"
    file = place / "weights.safetensors"
    if average:
        file = Path(shutil.copy(file, place / "average.safetensors"))
        other_tensors(file, lambda t: {name: x + 1 for name, x in t.items()})
        told = {"size": file.stat().st_size, "sha256": files.sha256(file)}
        changed(place / "manifest.json", **{"average.safetensors": told})
    stored = load_file(file)
    for which in ("last", "6"):
        found = load(run, which)
        assert found.step == 6
        assert found.model_sha256 == files.sha256(file)
        loaded = dict(found.model.named_parameters())
        assert all(torch.equal(x, loaded[name]) for name, x in stored.items())


@pytest.mark.parametrize("which", ["3", "-1", "06", "first", "", "../4", "9" * 30])
def test_a_checkpoint_that_is_not_there_is_refused_and_those_that_are_named(which: str, run: Path) -> None:
    with pytest.raises(UsageError, match="has no checkpoint") as caught:
        load(run, which)
    assert caught.value.remedy == "Use best, last or 2 or 4 or 6."


def test_a_damaged_checkpoint_is_refused_by_name(run: Path) -> None:
    os.truncate(run / "checkpoints" / "step-4" / "weights.safetensors", 100)
    with pytest.raises(WorkError, match=r"step-4 is damaged: weights.safetensors"):
        load(run, "4")
    assert load(run, "6").model is not None


def test_what_is_no_run_and_what_has_no_model_yet_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a run folder"):
        load(tmp_path / "nowhere")
    (run / "model").rename(tmp_path / "model")
    with pytest.raises(UsageError, match="holds no model yet"):
        load(run)


def test_an_evaluation_is_of_one_split_and_of_the_model_that_is_there(run: Path) -> None:
    found = load(run)
    with pytest.raises(UsageError, match="was not evaluated on test") as caught:
        found.evaluation("test")
    assert caught.value.remedy == f"Run: langevin evaluate {run} --split test"
    kept, path = found.keep_evaluation("test", {"rows": []})
    assert path == run / "evaluation-test.json"
    assert found.evaluation("test", {"rows": list}) == kept
    assert kept["step"] == found.step
    with pytest.raises(UsageError, match="was not evaluated on valid"):
        found.evaluation("valid")
    with pytest.raises(UsageError, match=r"evaluation-test.json is damaged: it has no calibration"):
        found.evaluation("test", {"calibration": dict})
    weights(lambda t: t.update({EMBED: t[EMBED] + 1}))(run / "model")
    with pytest.raises(UsageError, match="was trained on since it was evaluated on test"):
        load(run).evaluation("test")


def test_an_evaluation_of_version_0_1_is_known_by_its_step(run: Path) -> None:
    step = load(run).step
    (run / "evaluation-test.json").write_text(json.dumps({"split": "test", "step": step, "rows": []}))
    assert load(run).evaluation("test")["step"] == step
    (run / "evaluation-test.json").write_text(json.dumps({"split": "test", "step": 0, "rows": []}))
    with pytest.raises(UsageError, match="was trained on since"):
        load(run).evaluation("test")


def test_the_evaluation_of_a_checkpoint_stands_beside_that_of_the_best(run: Path) -> None:
    best, last = load(run), load(run, "last")
    best.keep_evaluation("test", {"rows": [1]})
    last.keep_evaluation("test", {"rows": [2]})
    assert best.evaluation("test")["rows"] == [1]
    assert last.evaluation("test")["rows"] == [2]


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff", b'{"split": "valid", "step": 2}'])
def test_a_damaged_evaluation_is_refused(data: bytes, run: Path) -> None:
    (run / "evaluation-test.json").write_bytes(data)
    with pytest.raises(UsageError, match=r"evaluation-test.json is damaged") as caught:
        load(run).evaluation("test")
    assert "langevin evaluate" in caught.value.remedy


def test_a_run_that_may_only_be_read_is_evaluated_and_generated_from(
    run: Path, unprivileged: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (run, *run.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = sorted(run.rglob("*"))
    unprivileged()
    assert main(["evaluate", str(run)]) == 0
    said = capsys.readouterr()
    assert "next-token accuracy" in said.out
    assert "cannot be written to" in said.err
    assert main(["generate", str(run), "--tokens", "4", "--samples", "2", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)[0]["tokens"] <= 4
    assert "samples.jsonl could not be written: Permission denied" in said.err
    assert main(["train", "--config", str(run / "config.yaml"), "--resume", "auto", "--out", str(run)]) == 2
    assert "cannot be written to: Permission denied" in capsys.readouterr().err
    assert sorted(run.rglob("*")) == before
