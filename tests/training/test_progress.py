"""What a run tells while it goes, and what is left of it when it is torn."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from small_run import small

from langevin.runs import train
from langevin.training import progress
from langevin.training.progress import cut_metrics

ROW = b'{"step": 4, "tokens": 64, "split": "valid", "loss": 2.5}\n'
LATER = b'{"step": 8, "tokens": 128, "split": "valid", "loss": 2.0}\n'


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))


@pytest.mark.filterwarnings("ignore:.*is damaged. .* left out")
@pytest.mark.parametrize(
    "torn",
    [
        b"1\n",
        b"[1]\n",
        b"{}\n",
        b'{"step": 2}\n',
        b'{"step": "two", "split": "train"}\n',
        b'{"step": 2, "split": 1}\n',
        b'\xff\xfe{"step": 2}\n',
        b"[" * 20000 + b"\n",
        b'{"step": 2, "spl',
        b"\n",
    ],
    ids=range(10),
)
def test_what_is_no_row_is_cut_away_and_the_rows_stay(torn: bytes, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(ROW + (torn if torn.endswith(b"\n") else b"") + LATER + torn)
    cut_metrics(file, 4)
    assert file.read_bytes() == ROW


@pytest.mark.filterwarnings("ignore:.*is damaged. .* left out")
def test_a_run_whose_metrics_were_torn_goes_on(tmp_path: Path) -> None:
    config = small(tmp_path, steps=8)
    train(config, tmp_path / "run", quiet=True)
    file = tmp_path / "run" / "metrics.jsonl"
    whole = file.read_bytes()
    file.write_bytes(b"1\n\xff\n" + whole + b'{"step": 9, "spl')
    train(config, tmp_path / "run", resume=True, quiet=True)
    assert file.read_bytes() == whole


def test_rows_tell_the_norm_of_the_gradient_before_it_is_clipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)  # a row a step
    clipped = small(tmp_path, steps=4, mixer="softmax", dropout=0.0, clip=1e-6, optimizer="muon")
    plain = small(tmp_path, steps=4, mixer="softmax", dropout=0.0, clip=1e6, optimizer="muon")
    norms = []
    for config in (clipped, plain):
        out = tmp_path / f"clip-{config.clip}"
        train(config, out, quiet=True)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        norms.append([row["gradient_norm"] for row in lines if row["split"] == "train"])
    assert norms[0][0] == pytest.approx(norms[1][0])
    assert all(math.isfinite(norm) and norm > 0.01 for norm in norms[0] + norms[1])
    assert len(norms[0]) == 4


def test_a_quiet_run_prints_nothing_at_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import transformers

    transformers.utils.logging.enable_progress_bar()
    config = small(tmp_path, steps=8, keep_evaluated=True)
    train(config, tmp_path / "run", quiet=True)
    torch.save({}, tmp_path / "run" / "checkpoints" / "step-8" / "state.json")
    train(config, tmp_path / "run", quiet=True, resume=True)
    assert capfd.readouterr() == ("", "")
    assert transformers.utils.logging.is_progress_bar_enabled()
