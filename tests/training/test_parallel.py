"""Two processes under torchrun train the same run as one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from small_run import small
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

from langevin.data import prepare
from langevin.errors import UsageError
from langevin.models.config import LangevinConfig
from langevin.models.convert import convert
from langevin.models.heads import LangevinForCausalLM
from langevin.runs import train
from langevin.settings import TrainConfig
from langevin.training.loop import Trainer
from langevin.training.parallel import World, blocks, built, own
from langevin.training.start import build


def in_two_processes(config: TrainConfig, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    settings = out.with_suffix(".yaml")
    settings.write_text(config.as_yaml())
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["-m", "langevin", "train", "--config", str(settings), "--out", str(out), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def losses(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if row["split"] == "valid"}


def plain(tmp_path: Path, **changes: Any) -> TrainConfig:
    values = {"mixer": "heat(t='head')", "dropout": 0.0, "steps": 8, "eval_every": 2, "ema": 0.5}
    return small(tmp_path, **{**values, **changes})


@pytest.mark.parametrize("kind", ["ddp from a pretrained teacher", "fsdp", "fsdp from pretrained weights"])
def test_two_processes_have_the_losses_of_one_and_one_goes_on_for_two(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))
    changes: dict[str, Any] = {"accumulate": 2, "parallel": kind.split()[0]}
    if "pretrained" in kind:
        shape = {"hidden_size": 16, "intermediate_size": 40, "num_attention_heads": 2, "vocab_size": 300}
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **shape))
        convert(model, "ssmax").save_pretrained(tmp_path / "llama")
        changes |= {"init": str(tmp_path / "llama"), "mixer": "ssmax"}
        changes |= {"layers": 4, "width": 128, "heads": 4}  # the defaults: the model decides
    if "teacher" in kind:
        changes |= {"objective": "distill", "mixer": "sima"}
    config = plain(tmp_path, **changes)
    train(config, tmp_path / "one", quiet=True)
    done = in_two_processes(config, tmp_path / "two")
    assert done.returncode == 0, done.stderr
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert one.keys() == two.keys() == {2, 4, 6, 8} | ({0} if "pretrained" in kind else set())
    for step in one:
        assert two[step] == pytest.approx(one[step], abs=1e-5)
    for damaged in (tmp_path / "two" / "checkpoints").glob("step-8/manifest.json"):
        damaged.unlink()  # as if the last checkpoint had not been finished
    run, _ = train(replace(config, parallel="ddp"), tmp_path / "two", resume=True, quiet=True)
    assert losses(run.path)[8] == pytest.approx(one[8], abs=1e-5)
    assert run.model(torch.arange(5)[None]).logits.isfinite().all()


def test_two_processes_with_dropout_go_on_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))
    config = plain(tmp_path, dropout=0.3)
    done = in_two_processes(config, tmp_path / "whole")
    assert done.returncode == 0, done.stderr
    shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    (tmp_path / "broken" / "checkpoints" / "step-8" / "manifest.json").unlink()
    done = in_two_processes(config, tmp_path / "broken", "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert "going on from step 4" in done.stderr
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")


LIMITED = """
import resource, sys
from pathlib import Path
import torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor
from langevin import runs
from langevin.settings import TrainConfig
from langevin.training import start
status = dict(line.split(":") for line in open("/proc/self/status"))
most = int(status["VmData"].split()[0]) * 1024 + int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_DATA, (most, most))
runs.train(TrainConfig.read(Path(sys.argv[1])), Path(sys.argv[2]), quiet=True)
"""


@pytest.mark.slow  # starts four processes, and draws and writes some hundred megabytes
@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of processes as Linux does")
def test_two_processes_train_a_model_that_neither_may_hold_and_one_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and moments take 379 MB; a process may have 350 MB more than it has when it starts."""
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))
    large = {"layers": 40, "width": 256, "heads": 4, "batch": 2, "steps": 2, "eval_tokens": 16}
    config = plain(tmp_path, **large, ema=0.0, checkpoint_every=1, parallel="fsdp")
    limit = 350_000_000
    data = prepare(config.data, "bytes", progress=False)
    assert 3 * 4 * sum(p.numel() for p in build(config, data).parameters()) > limit
    settings, script = tmp_path / "settings.yaml", tmp_path / "limited.py"
    settings.write_text(config.as_yaml())
    script.write_text(LIMITED)
    # What is freed goes back at once.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "200000"}

    def limited(out: str, *launcher: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *launcher, str(script), str(settings), str(tmp_path / out), str(limit)]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    alone = limited("alone")
    assert alone.returncode == 1
    assert "can't allocate memory" in alone.stderr
    together = limited("two", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    assert together.returncode == 0, together.stderr[-3000:]
    two = losses(tmp_path / "two")
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "step-2")
    run, _ = train(config, tmp_path / "two", resume=True, quiet=True)
    assert losses(run.path)[2] == pytest.approx(two[2], abs=1e-5)
    assert sum(p.numel() for p in run.model.parameters()) * 12 > limit


@contextmanager
def among_three(rank: int) -> Iterator[World]:
    """A process among three, of which the others are not there."""
    dist.init_process_group("fake", rank=rank, world_size=3, store=FakeStore())
    try:
        yield World(rank, 3)
    finally:
        dist.destroy_process_group()


def rows_of(x: torch.Tensor, rank: int) -> torch.Tensor:
    chunks = x.chunk(3)
    return chunks[rank] if rank < len(chunks) else x[:0]


def ours(mixer: str) -> Any:
    shape = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 11}
    return LangevinForCausalLM(LangevinConfig(mixer=mixer, mlp="swiglu", norm="rmsnorm", **shape))


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("mixer", ["softmax", "heat(t='head')+drift", "neighbor(kind='content')", "ssmax"])
def test_the_rows_a_process_makes_are_those_of_the_model_one_process_would_make(
    mixer: str, rank: int
) -> None:
    """Bit for bit, also where rows do not divide evenly, and with the random stream where it would be."""
    torch.manual_seed(3)
    whole = ours(mixer)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    with among_three(rank) as world:
        model = built(lambda: ours(mixer), "fsdp", world, "cpu")
    assert torch.equal(torch.get_rng_state(), after)
    mine = dict(model.named_parameters())
    assert mine.keys() == dict(whole.named_parameters()).keys()
    for name, p in whole.named_parameters():
        assert torch.equal(own(mine[name]), rows_of(p, rank)), name
    assert model.lm_head.weight is model.model.embed.weight


def llama() -> Any:
    shape = {"hidden_size": 8, "intermediate_size": 20, "num_attention_heads": 2, "vocab_size": 11}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, pad_token_id=0, **shape))


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=11, n_positions=16))


def without_values(make: Any) -> Any:
    with no_init_weights():
        model = make()
    model.tie_weights()
    return model


@pytest.mark.parametrize("make", [llama, gpt2, lambda: ours("ssmax")], ids=["llama", "gpt2", "ours"])
@pytest.mark.parametrize("part", [False, True], ids=["whole", "without its head"])
def test_pretrained_weights_are_read_row_by_row(make: Any, part: bool, tmp_path: Path) -> None:
    saved = make()
    (saved.base_model if part else saved).save_pretrained(tmp_path, max_shard_size="1KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    for rank in range(3):
        with among_three(rank) as world:
            if part and make is llama:
                with pytest.raises(UsageError, match=r"what lm_head\.weight of the model starts from"):
                    built(lambda: without_values(make), "fsdp", world, "cpu", files)
                return
            model = built(lambda: without_values(make), "fsdp", world, "cpu", files)
        mine = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, p in saved.named_parameters():
            assert torch.equal(own(mine[name]), rows_of(p, rank)), name
        for name, buffer in saved.named_buffers():
            assert torch.equal(mine[name], buffer), name


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"model.norm.weight": torch.ones(1)}, file)
    with among_three(1) as world:
        with pytest.raises(UsageError, match=r"model\.norm\.weight of shape \[1\], \(8,\) in the model"):
            built(llama, "fsdp", world, "cpu", [file])
        save_file({"odd": torch.ones(1)}, file)
        with pytest.raises(UsageError, match=r"odd of shape \[1\], not in the model"):
            built(llama, "fsdp", world, "cpu", [file])


def test_blocks_are_found_in_any_model() -> None:
    assert [type(block).__name__ for block in blocks(llama())] == ["LlamaDecoderLayer"] * 2
    assert [type(block).__name__ for block in blocks(ours("softmax"))] == ["LangevinBlock"] * 2
    inner = nn.ModuleList([nn.Linear(2, 2)])
    plain = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.ModuleList([inner]), nn.Identity()]))
    assert blocks(plain) == list(plain[1])


def test_processes_that_do_not_divide_the_batch_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))
    config = plain(tmp_path, batch=3)
    corpus = prepare(config.data, "bytes", progress=False)
    with pytest.raises(UsageError, match="2 processes do not divide a batch of 3"):
        Trainer(config, build(config, corpus), corpus, tmp_path, World(0, 2))
