"""Exported classifiers: they say what PyTorch says, without it, and other files are refused."""

from __future__ import annotations

import copy
import csv
import errno
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from langevin import cli
from langevin.cli.exported import light, show
from langevin.data.tokenizers import make
from langevin.errors import UsageError, WorkError
from langevin.export import to_onnx
from langevin.export.runtime import MARK, OnnxClassifier
from langevin.models.config import LangevinConfig
from langevin.models.heads import LangevinForSequenceClassification

TEXTS = ["fine", "cold and grey film\n\tof 1999!", "😀 <|endoftext|> naïve", "", "square " * 200]


def told(capsys: pytest.CaptureFixture[str], model: Path, *texts: str) -> list[dict[str, Any]]:
    assert cli.main(["predict", str(model), "--json", "--text", *texts]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_a_file_says_what_the_run_says(run: Any, exported: Any, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [text for text in TEXTS if text]
    ours, theirs = (told(capsys, at, *texts) for at in (run.path, exported[0] / "model.onnx"))
    for one, other in zip(ours, theirs, strict=True):
        assert one["label"] == other["label"]
        assert one["probabilities"] == pytest.approx(other["probabilities"], abs=1e-5)


def test_what_is_measured_of_the_files(exported: Any) -> None:
    out, rows = exported
    torch_, whole, small = rows
    assert torch_["accuracy"] > 0.9
    assert whole["largest_difference"] < 1e-5
    assert small["accuracy"] > torch_["accuracy"] - 0.02
    assert small["bytes"] == (out / "model-int8.onnx").stat().st_size < 0.5 * whole["bytes"]
    assert 0 < small["ms_p50"] <= small["ms_p90"]
    assert 30 < small["peak_mb"] < 75
    assert {path.name for path in out.iterdir()} == {
        *("model.onnx", "model-int8.onnx", "tokenizer.json", "labels.json")
    }


def test_weights_of_the_small_file_have_a_byte(exported: Any) -> None:
    graph = onnx.load(exported[0] / "model-int8.onnx").graph
    large = [w for w in graph.initializer if np.prod(w.dims) > 1024]
    assert large
    assert {w.data_type for w in large} == {onnx.TensorProto.INT8}


def test_a_table_is_classified_without_torch(run: Any, exported: Any, table: Path, tmp_path: Path) -> None:
    code = """
import sys
from langevin import cli
assert cli.main(sys.argv[1:]) == 0
assert not {"torch", "transformers", "onnx"} & set(sys.modules)
"""
    files = []
    for model in (exported[0] / "model.onnx", run.path):
        given = ["predict", str(model), "--file", str(table), "--out", str(tmp_path / f"{model.name}.csv")]
        if model.suffix:
            subprocess.run([sys.executable, "-c", code, *given], check=True, capture_output=True)
        else:
            assert cli.main(given) == 0
        with open(given[-1], newline="", encoding="utf-8") as file:
            files.append(list(csv.DictReader(file)))
    assert [row["label"] for row in files[0]] == [row["label"] for row in files[1]]
    shares = [[float(row["probability"]) for row in rows] for rows in files]
    assert shares[0] == pytest.approx(shares[1], abs=1e-5)


@pytest.mark.parametrize(
    "given",
    [["--text", "fine"], ["--text", "fine", "a b", "--json"], ["--json", "--text", "fine, “warm”"]],
    ids=" ".join,
)
def test_texts_in_a_command_are_read_as_by_the_parser(
    exported: Any, given: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["predict", str(exported[0] / "model-int8.onnx"), *given]
    assert light(command[1:]) is not None
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    monkeypatch.setattr("langevin.cli.exported.light", lambda given: None)
    assert cli.main(command) == 0
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["model.onnx"],
        ["model.onnx", "--text"],
        ["model.onnx", "--text", "--json"],
        ["model.onnx", "--text", "a", "--json", "b"],
        ["model.onnx", "--text", "a", "--batch", "3"],
        ["model.onnx", "--text=a"],
        ["model.onnx", "--help"],
        ["runs/x", "--text", "a"],
        ["--text", "a", "--json"],
    ],
    ids=" ".join,
)
def test_any_other_command_is_left_to_the_parser(given: list[str]) -> None:
    assert light(given) is None


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="libraries have other sizes there"
)
def test_a_command_with_30_000_words_takes_little_memory(run: Any, tmp_path: Path) -> None:
    """It was measured to peak below 70 MB; other versions of the libraries may take more."""
    words = [f"word{i}" for i in range(30_000)]
    tokenizer = make("words", [" ".join(words)] * 2, [])
    config = copy.deepcopy(run.model.config)
    config.update({"vocab_size": len(tokenizer), "hidden_size": 128, "num_hidden_layers": 4})
    proto = to_onnx.quantised(to_onnx.graph_of(LangevinForSequenceClassification(config).eval()))
    like = SimpleNamespace(tokenizer=tokenizer, config=run.config, task=run.task)
    proto.metadata_props.add(key=MARK, value=to_onnx._write_texts(like, list("abc"), tmp_path))
    onnx.save(proto, tmp_path / "model-int8.onnx")
    code = """
import sys
from langevin import cli
assert cli.main(sys.argv[1:]) == 0
print(open("/proc/self/status").read())
"""
    given = ["predict", str(tmp_path / "model-int8.onnx"), "--text", " ".join(words[:200])]
    told = subprocess.run([sys.executable, "-c", code, *given], check=True, capture_output=True, text=True)
    peak = re.search(r"VmHWM:\s+(\d+) kB", told.stdout)
    assert peak is not None
    assert 40 < int(peak[1]) * 1024 / 1e6 < 75


def test_padding_and_company_change_nothing(exported: Any) -> None:
    classify = OnnxClassifier(exported[0] / "model.onnx", batch=8)
    alone = np.concatenate([classify([text]) for text in TEXTS])
    np.testing.assert_allclose(classify(TEXTS), alone, atol=1e-6)


@pytest.mark.parametrize("flags", [[], ["--batch", "3"]], ids=["light", "parser"])
def test_an_empty_text_has_no_class(
    exported: Any, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["predict", str(exported[0] / "model.onnx"), "--text", "fine", " ", *flags]
    assert cli.main(command) == 2
    assert "text 2 of 2 is empty" in capsys.readouterr().err


def test_names_and_texts_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    show("text", [":cat: [b]"], [":smile:", "[i]"], [[0.7, 0.3]], False)
    shown = capsys.readouterr().out
    assert all(part in shown for part in (":cat: [b]", ":smile:", "[i] 30.0%"))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda at: (at / "tokenizer.json").unlink(), "no tokenizer.json beside it"),
        (lambda at: (at / "labels.json").unlink(), "no labels.json beside it"),
        (lambda at: (at / "tokenizer.json").write_text("{}"), "tokenizer.json .* of another model"),
        (lambda at: (at / "labels.json").write_text("{}"), "labels.json .* of another model"),
        *(
            (lambda at, some=some: (at / "labels.json").write_bytes(some), "labels.json .* or damaged")
            for some in (b'{"labels": ["a", "b', b"[1]", b"null", b"", b"\x80\xff\x00\x01", b"[" * 100_000)
        ),
        (lambda at: (at / "model.onnx").write_text("nothing"), "cannot be run"),
        (lambda at: foreign(at / "model.onnx"), "not a classifier made by langevin"),
    ],
)
def test_files_that_are_not_ours_are_refused(exported: Any, tmp_path: Path, harm: Any, said: str) -> None:
    folder = tmp_path / "export"
    shutil.copytree(exported[0], folder)
    harm(folder)
    with pytest.raises(UsageError, match=said):
        OnnxClassifier(folder / "model.onnx")
    assert cli.main(["predict", str(folder / "model.onnx"), "--text", "a"]) == 2


def foreign(path: Path) -> None:
    model = onnx.load(path)
    del model.metadata_props[:]
    onnx.save(model, path)


def test_a_file_that_says_something_else_is_not_kept(
    run: Any, exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = onnx.load(exported[0] / "model.onnx")
    (head,) = (w for w in model.graph.initializer if w.name.endswith("score.bias"))
    other = onnx.numpy_helper.to_array(head) + np.array([100, 0, 0], np.float32)
    head.CopyFrom(onnx.numpy_helper.from_array(other, head.name))
    del model.metadata_props[:]
    monkeypatch.setattr(to_onnx, "graph_of", lambda model_: model)
    with pytest.raises(WorkError, match="nothing was written"):
        to_onnx.export(run, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["out", "there/out"])
def test_a_folder_that_cannot_be_written_is_told_before_the_work(
    run: Any, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(dir: Path) -> Any:
        raise OSError(errno.EROFS, "Read-only file system", str(dir))

    (tmp_path / "there" / "out").mkdir(parents=True)
    monkeypatch.setattr(tempfile, "TemporaryDirectory", refused)
    monkeypatch.setattr(to_onnx, "graph_of", lambda model: pytest.fail("it was exported"))
    assert cli.main(["export", str(run.path), "--out", str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert "cannot be written: Read-only file system" in said
    assert "Choose another --out." in said


def test_a_folder_with_something_in_it_is_left_alone(run: Any, exported: Any) -> None:
    assert cli.main(["export", str(run.path)]) == 2


MIXERS = [
    *("softmax", "sima", "sigmoid", "neighbor", "neighbor(kind='linear', hops='dilated')"),
    "neighbor(kind='recurrent')",
]
POOLINGS = {"softmax": "last", "sima": "attention", "neighbor(kind='recurrent')": "ends"}


@pytest.mark.parametrize(
    ("mixer", "pooling"), [*((m, POOLINGS.get(m, "mean")) for m in MIXERS), ("softmax", "ngrams")]
)
def test_every_kind_of_mixer_and_pooling_can_be_exported(mixer: str, pooling: str) -> None:
    config = LangevinConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        mixer=mixer,
        causal=False,
        max_position_embeddings=160,
        positions="rope",
        num_labels=3,
        temperature=0.1,
        pooling=pooling,
    )
    model = LangevinForSequenceClassification(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    proto = to_onnx.graph_of(model)
    for graph, tolerance in ((proto, 1e-5), (to_onnx.quantised(proto), 0.1)):
        session = onnxruntime.InferenceSession(graph.SerializeToString())
        for batch, length in ((1, 1), (3, 40), (2, 160)):
            ids, real = torch.randint(50, (batch, length)), torch.ones(batch, length, dtype=torch.bool)
            for row in range(1, batch):
                real[row, length - 7 * row :] = False
            with torch.no_grad():
                ours = model(input_ids=ids, attention_mask=real).logits.softmax(-1).numpy()
            (theirs,) = session.run(None, {"input_ids": ids.numpy(), "attention_mask": real.numpy()})
            np.testing.assert_allclose(theirs, ours, atol=tolerance)
