"""The options of the commands about mixers: list, check, bench, convert, doctor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro


@dataclass(frozen=True)
class ListNames:
    """List what langevin knows by name."""

    kind: tyro.conf.Positional[
        Literal["mixers", "wrappers", "aliases", "objectives", "tasks", "data", "recipes"]
    ] = "mixers"
    """What to list."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        from langevin.commands import list_command

        return list_command(self.kind, self.json)


@dataclass(frozen=True)
class Check:
    """Check that a mixer, or a saved causal model, keeps its promises.

    Tries to break it: future leaks, prefixes, caches, padding, packed documents, randomness in evaluation,
    gradients, low precision, extreme inputs, compilation and the formula itself. Exit status 1 when
    something fails.

    Examples: langevin check heat ; langevin check mine.py:Mixer --against "ssmax(s=0.43)" ;
    langevin check runs/x/model
    """

    targets: tyro.conf.Positional[tuple[str, ...]] = ()
    """Mixer specs, file.py:Name, or folders of saved models; none: every mixer and wrapper."""
    against: str | None = None
    """Also compare with the formula of this mixer."""
    only: tuple[str, ...] = ()
    """Try only these properties, by name."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        from langevin.commands import check_command

        return check_command(self.targets, self.against, list(self.only) or None, self.json)


@dataclass(frozen=True)
class Bench:
    """Measure time and peak memory of mixers, as ratios to plain softmax in the same run.

    mixers: the mixing alone, forward and backward, at several lengths. train: whole training steps.

    Examples: langevin bench mixers ssmax "heat(t=0.28)" --lengths 1024 4096 --device cuda --compile ;
    langevin bench train ssmax sigmoid --layers 4 --width 256 --context 256 --batch 32 --vocab 50257
    """

    what: tyro.conf.Positional[Literal["mixers", "train"]] = "mixers"
    """What to measure."""
    specs: tyro.conf.Positional[tuple[str, ...]] = ()
    """Mixer specs; none: every mixer."""
    width: int = 256
    heads: int = 4
    repeats: int = 10
    """Timed runs of each; the median and the interquartile range are reported."""
    device: str = "cpu"
    json: Path | None = None
    """Also write every number to this file."""

    lengths: tuple[int, ...] = (256, 1024, 2048)
    """mixers: sequence lengths."""
    tokens: int = 2048
    """mixers: tokens per batch: the batch is tokens // length, at least 1."""
    bidirectional: bool = False
    """mixers: measure without causality."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """mixers: the type of inputs and weights."""
    compile: bool = False
    """mixers: measure under torch.compile (train does it on a GPU)."""

    layers: int = 4
    """train: layers of the model."""
    context: int = 256
    """train: tokens a sequence."""
    batch: int = 32
    """train: sequences a step."""
    vocab: int = 256
    """train: size of the vocabulary."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """train: the optimiser."""
    positions: Literal["none", "learned", "sinusoidal", "rope", "alibi"] = "rope"
    """train: the positions."""
    checkpointing: bool = False
    """train: compute activations again in the backward pass."""

    def run(self) -> int:
        from langevin.commands import bench_command, bench_training_command

        return bench_command(self) if self.what == "mixers" else bench_training_command(self)


@dataclass(frozen=True)
class Convert:
    """Put a mixer into a saved transformers model.

    Example: langevin convert path/to/gpt2 "softmax+drift" --out converted
    """

    model: tyro.conf.Positional[str]
    """A folder made by save_pretrained, or a name on the Hugging Face Hub."""
    spec: tyro.conf.Positional[str]
    """The mixer, for example "heat(t='head')"."""
    out: Path
    """The folder to write."""

    def run(self) -> int:
        from langevin.commands import convert_command

        return convert_command(self.model, self.spec, self.out)


@dataclass(frozen=True)
class Doctor:
    """Say what this machine has and whether langevin works on it."""

    def run(self) -> int:
        from langevin.commands import doctor_command

        return doctor_command()
