"""Costs: what `bench` measures, and the memory that kernels must not use."""

import subprocess
import sys

import pytest
import torch

from langevin import cli
from langevin.bench.edge import bench_edge, draw
from langevin.bench.mixers import Settings, bench_mixers, peak_memory
from langevin.cli.mixers import Bench
from langevin.mixers import names
from langevin.settings import TrainConfig

TINY = Settings(lengths=(24, 48), width=16, heads=2, tokens=96, repeats=3, warmup=1)


def test_every_registered_mixer_is_measured_against_softmax_in_the_same_run():
    rows = bench_mixers(names(), TINY)["rows"]
    modules = [row for row in rows if row["part"] == "module"]
    assert {row["mixer"] for row in modules} == set(names())
    assert {row["length"] for row in rows} == {24, 48}
    for row in rows:
        assert row["forward_ms"] > 0
        assert row["both_ms"] > 0
        assert row["peak_mib"] > 0
        if row["mixer"] == "softmax":
            assert row["forward_ratio"] == row["both_ratio"] == row["peak_ratio"] == 1


def test_peak_memory_counts_what_is_alive_at_once():
    def both_at_once():
        a = torch.empty(2**20)
        b = torch.empty(2**20)
        return float(a[0] + b[0])

    def one_after_the_other():
        for _ in range(5):
            torch.empty(2**20)

    assert peak_memory(both_at_once) == pytest.approx(2 * 2**22, rel=0.01)
    assert peak_memory(one_after_the_other) == pytest.approx(2**22, rel=0.01)


def test_peak_memory_of_materialised_attention_is_what_theory_says():
    q, k, v = (torch.randn(1, 1, 512, 64, requires_grad=True) for _ in range(3))

    def materialised():
        torch.softmax(q @ k.transpose(-1, -2), -1).matmul(v).sum().backward()

    assert peak_memory(materialised) > 2 * 512 * 512 * 4


@pytest.mark.parametrize("spec", ["sigmoid", "sima"])
def test_a_long_sequence_needs_under_600_mb_in_all(spec):
    """Forward and backward at L = 16,384, one head of 64: the whole process, torch included.

    getrusage would count the process that this one was forked from as well.
    """
    code = f"""
import re, torch, langevin
q, k, v = (torch.randn(1, 1, 16384, 64, requires_grad=True) for _ in range(3))
langevin.attend(q, k, v, {spec!r}, causal=True).sum().backward()
assert q.grad.isfinite().all()
print(int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1000)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 600


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (Settings(dtype="float8"), "unknown dtype"),
        (Settings(width=30, heads=4), "do not divide"),
        (Settings(lengths=(0,)), "must be 1 or more"),
    ],
)
def test_wrong_settings_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        bench_mixers(["softmax"], settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU where there is none")
def test_a_missing_gpu_is_said():
    with pytest.raises(ValueError, match="no CUDA device"):
        bench_mixers(["softmax"], Settings(device="cuda"))


@pytest.mark.slow  # compiles C++ for ten graphs
def test_compiled_cases_do_not_crowd_each_other_out():
    from dataclasses import replace

    rows = bench_mixers(["ssmax", "heat(t=0.28)"], replace(TINY, lengths=(24,), compile=True))["rows"]
    assert len(rows) == 6


@pytest.mark.parametrize("name", ["there.png", "there.png/below"])
def test_a_place_where_no_pictures_can_be_drawn_is_told_before_measuring(
    tmp_path, monkeypatch, capsys, name
):
    (tmp_path / "there.png").write_text("")
    monkeypatch.setattr(Bench, "_measured", lambda *given: pytest.fail("it was measured"))
    assert cli.main(["bench", "edge", "--plot", str(tmp_path / name)]) == 2
    assert "there.png is no folder" in capsys.readouterr().err


def test_classifiers_of_as_many_parameters_stand_beside_one_of_another_shape(tmp_path):
    small = {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 64}
    config = TrainConfig(layers=1, width=32, heads=2, batch=2, device="cpu")
    result = bench_edge(
        ["neighbor"], config, vocab=50, lengths=(32, 64), int8=True, repeats=3, distilbert=small
    )
    rows = result["rows"]
    assert not result["left_out"]
    assert {(row["part"], row["batch"]) for row in rows} == {
        *(("training", 2), ("inference", 1), ("inference", 2), ("int8", 1))
    }
    ours = [row for row in rows if "DistilBERT" not in row["model"]]
    most, least = (edge(row["parameters"] for row in ours) for edge in (max, min))
    assert most - least < 0.02 * least
    for row in rows:
        assert 0 < row["ms_p50"] <= row["ms_p90"] <= row["ms_p99"]
        assert row["mib"] == pytest.approx(row["batch"] * row["mib_a_text"])
        if row["model"] == "softmax":
            assert row["ratio"] == 1
            # 2 FLOPs a parameter and token of the matrices, and 4 · width for each pair of tokens
            pairs = 4 * 32 * row["length"] ** 2
            matrices = 2 * row["length"] * 12 * 32**2
            assert 1e9 * row["gflops"] == pytest.approx(pairs + matrices, rel=0.01)
    training = {row["model"]: row for row in rows if row["part"] == "training" and row["length"] == 64}
    softmax = training["softmax"]
    assert softmax["mib"] > 16 * softmax["parameters"] / 2**20
    assert all(path.stat().st_size > 1000 for path in draw(rows, tmp_path))
