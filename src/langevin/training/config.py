"""What a training run is: every choice in one frozen record, written into the run folder."""

from __future__ import annotations

import os
import typing
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from langevin.errors import UsageError, unknown
from langevin.settings import check_type

POSITIVE = (
    *("layers", "width", "heads", "kv_heads", "mlp_width", "context", "batch", "accumulate", "keep"),
    *("lr", "muon_lr", "clip", "max_bad_steps"),
    *("tokens", "steps", "minutes", "eval_every", "eval_tokens", "checkpoint_every", "train_tokens"),
)


@dataclass(frozen=True)
class TrainConfig:
    """Train a language model with any mixer on any text."""

    task: Literal["lm"] = "lm"
    """What the model is tried on: lm, language modelling."""
    data: str = "stories"
    """A named data set (langevin data list), a text file or a folder of text files."""
    tokenizer: str | None = None
    """bytes, chars, bpe-N, or a transformers tokenizer; default: what suits the data."""
    mixer: str = "softmax"
    """A mixer spec, or one per layer separated by semicolons."""
    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int | None = None
    context: int = 128
    """Tokens a sequence."""
    positions: Literal["none", "learned", "sinusoidal", "rope", "alibi"] = "rope"
    mlp: Literal["gelu", "swiglu"] = "gelu"
    mlp_width: int | None = None
    """Hidden width of the MLP; default: 4 widths, or 8/3 for swiglu."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    qk_norm: bool = False
    dropout: float = 0.0
    tie: bool = True
    """Share the input and output embeddings."""

    batch: int = 32
    """Sequences a step, whatever the number of parts or processes they are computed in."""
    accumulate: int | None = None
    """Parts a step is computed in; default: as few as fit into the memory of the device."""
    train_tokens: int | None = None
    """Train on only the first so many tokens of the data, over and over."""
    tokens: int | None = None
    """Budget in training tokens (one of tokens, steps, minutes)."""
    steps: int | None = None
    minutes: float | None = None
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float = 3e-3
    muon_lr: float = 0.02
    """Learning rate of the matrices under muon; everything else takes lr."""
    weight_decay: float = 0.1
    beta2: float = 0.95
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup: float = 0.05
    """Fraction of the steps over which the learning rate rises."""
    final_lr: float = 0.1
    """Fraction of the learning rate left at the end."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    ema: float = 0.0
    """Decay of an exponential average of the weights, which is then what is evaluated; 0: none."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto: bf16 on a GPU that has it, fp32 elsewhere; weights and moments stay in fp32."""
    compile: Literal["auto", "on", "loss", "off"] = "auto"
    """torch.compile; auto: on a GPU. loss: only the loss, which takes seconds and not half a minute."""
    graphs: bool = True
    """On one GPU, replay whole steps as a CUDA graph."""
    checkpointing: bool = False
    """Compute activations again in the backward pass, for less memory."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: copies of the model (ddp), or one spread over the processes (fsdp)."""
    device: str = "auto"
    seed: int = 0

    eval_every: int | None = None
    """Steps between evaluations; default: ten over the run."""
    eval_tokens: int = 32_768
    """Validation tokens an evaluation during training looks at, the same ones every time."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; default: with an evaluation, half a minute or more after the last."""
    keep_evaluated: bool = False
    """Keep the model of every evaluation, in evaluated/step-N."""
    keep: int = 2
    """Checkpoints kept, besides the best."""
    max_bad_steps: int = 10
    """Steps with a loss or gradient that is not finite, in a row, before the run stops."""
    track: str | None = None
    """Also send the metrics to tensorboard, wandb, or both separated by a comma (extra `track`)."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for f in fields(self):
            check_type(f"{f.name}=...", getattr(self, f.name), hints[f.name])
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"{name}={value} must be positive")
        given = [n for n in ("tokens", "steps", "minutes") if getattr(self, n) is not None]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} both set a budget", "Give one of them.")
        if self.batch % (self.accumulate or 1):
            raise UsageError(
                f"{self.accumulate} parts do not divide a batch of {self.batch}",
                "Choose another accumulate or batch.",
            )
        for name in ("weight_decay", "seed"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name}={getattr(self, name)} must be 0 or more")
        if self.train_tokens is not None and self.train_tokens <= self.context + 1:
            raise UsageError(
                f"train_tokens={self.train_tokens} are too few for a context of {self.context}",
                "Use a shorter --context, or more tokens.",
            )
        for name in ("warmup", "final_lr", "ema", "dropout", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)} must be from 0 to below 1")

    @property
    def mixers(self) -> str | list[str]:
        parts = [part.strip() for part in self.mixer.split(";")]
        return parts[0] if len(parts) == 1 else parts

    def write(self, path: Path) -> None:
        """In one move: a run whose settings are torn could not go on."""
        draft = path.with_name(f".{path.name}.writing")
        draft.write_text(yaml.safe_dump(asdict(self), sort_keys=False))
        os.replace(draft, path)

    @staticmethod
    def read(path: Path, **changes: Any) -> TrainConfig:
        """A config file; every key must be known."""
        try:
            values = yaml.safe_load(path.read_text())
        except (OSError, ValueError, yaml.YAMLError) as error:
            cause = str(error).splitlines()[0]
            raise UsageError(f"{path} cannot be read: {cause}", "Give a YAML file.") from error
        if not isinstance(values, dict):
            raise UsageError(f"{path} is not a table of settings", "Write one `key: value` a line.")
        known = [f.name for f in fields(TrainConfig)]
        for key in values:
            if key not in known:
                raise unknown(f"setting in {path}", str(key), known)
        return replace(TrainConfig(**values), **changes)
