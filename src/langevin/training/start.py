"""From a config to a finished run folder: prepare the data, build the model, train or go on training."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from langevin.data import Corpus, prepare
from langevin.errors import UsageError
from langevin.models.backbone import LangevinForCausalLM
from langevin.models.config import LangevinConfig
from langevin.runs import Run, environment
from langevin.training import checkpoint
from langevin.training.config import TrainConfig
from langevin.training.loop import Trainer
from langevin.training.progress import Progress, cut_metrics

# Settings that may change when a run goes on: they do not change what is computed.
MAY_CHANGE = ("device", "keep", "checkpoint_every")


def train(
    config: TrainConfig, out: Path | None = None, *, resume: bool = False, quiet: bool = False
) -> tuple[Run, int | None]:
    """Train into a run folder; the run, and the signal that stopped it early (None: it is finished)."""
    folder = out or default_folder(config)
    console = Console(stderr=True, quiet=quiet)
    going_on = _open(folder, config, resume)
    device = pick_device(config.device)
    model_config(config, vocab_size=2, eos=0)  # what cannot be built should not wait for the data
    corpus = prepare(config.data, tokenizer=config.tokenizer, progress=not quiet)
    torch.manual_seed(config.seed)
    trainer = Trainer(config, build(config, corpus).to(device), corpus, folder)
    folder.mkdir(parents=True, exist_ok=True)
    config.write(folder / "config.yaml")
    about = environment(device, corpus.manifest)
    (folder / "environment.json").write_text(json.dumps(about, indent=1))
    if going_on:
        refused: list[str] = []
        last = checkpoint.newest(folder / "checkpoints", refused)
        for problem in refused:
            console.print(f"refused checkpoint {problem}; the one before it is used", style="yellow")
        if last is not None:
            trainer.resume(last)
        cut_metrics(folder / "metrics.jsonl", trainer.state.step)
        console.print(f"going on from step {trainer.state.step}")
    trainer.run(Progress(folder, quiet))
    return Run(folder, config), trainer.stopped_by


def build(config: TrainConfig, corpus: Corpus) -> LangevinForCausalLM:
    """The model of a config, for the vocabulary of a corpus."""
    if len(corpus.tokens("train")) <= config.context + 1:
        raise UsageError(
            f"{config.data} has {len(corpus.tokens('train'))} training tokens, too few for a context "
            f"of {config.context}",
            "Use a shorter --context, or more text.",
        )
    return LangevinForCausalLM(model_config(config, corpus.vocab_size, corpus.eos)).train()


def model_config(config: TrainConfig, vocab_size: int, eos: int) -> LangevinConfig:
    return LangevinConfig(
        vocab_size=vocab_size,
        hidden_size=config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.context,
        mixer=config.mixers,
        positions=config.positions,
        mlp=config.mlp,
        norm=config.norm,
        qk_norm=config.qk_norm,
        dropout=config.dropout,
        tie_word_embeddings=config.tie,
        eos_token_id=eos,
        pad_token_id=eos,
    )


def estimate(config: TrainConfig) -> dict[str, Any]:
    """Parameters, training FLOPs per token and memory of a run, before it is made.

    6 FLOPs a parameter and token for the matrix products, and 12 · width · context / 2 a layer for causal
    attention; memory for weights, gradients and two moments in float32, and activations not counted.
    """
    corpus = prepare(config.data, tokenizer=config.tokenizer, progress=False)
    with torch.device("meta"):
        model = build(config, corpus)
    parameters = sum(p.numel() for p in model.parameters())
    embeddings = model.get_input_embeddings().weight.numel()
    flops = 6 * (parameters - (0 if config.tie else embeddings))
    flops += 6 * config.layers * config.width * config.context
    a_step = config.batch * config.context
    steps = config.steps or (config.tokens or 10_000_000) // a_step
    return {
        "parameters": parameters,
        "of which embeddings": embeddings,
        "training tokens in the data": len(corpus.tokens("train")),
        "tokens a step": a_step,
        "steps": None if config.minutes else steps,
        "FLOPs a token": flops,
        "FLOPs in all": None if config.minutes else flops * steps * a_step,
        "bytes of weights, gradients and moments": 16 * parameters,
    }


def default_folder(config: TrainConfig) -> Path:
    name = re.sub(r"[^a-z0-9.]+", "-", f"{Path(config.data).stem}-{config.mixer}".lower()).strip("-")
    return Path("runs") / f"{name}-{config.seed}"


def pick_device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError("no CUDA device is here", "Use --device cpu.")
    return name


def _open(folder: Path, config: TrainConfig, resume: bool) -> bool:
    """Whether the folder holds a run to go on with; raises where that is not what was asked for."""
    if not (folder / "config.yaml").exists():
        if folder.exists() and any(folder.iterdir()):
            raise UsageError(f"{folder} holds something else", "Choose another --out.")
        return False
    if not resume:
        raise UsageError(
            f"{folder} holds a run already", "Go on with it by --resume auto, or choose another --out."
        )
    before = asdict(TrainConfig.read(folder / "config.yaml"))
    for f in fields(TrainConfig):
        now = getattr(config, f.name)
        if before[f.name] != now and f.name not in MAY_CHANGE:
            raise UsageError(
                f"{folder} was trained with {f.name}={before[f.name]!r}, not {now!r}",
                "Give the same settings, or another --out.",
            )
    return True
