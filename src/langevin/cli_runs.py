"""The options of the commands about runs: data, train, evaluate, generate, plot."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from langevin.training.config import TrainConfig


@dataclass(frozen=True)
class Data:
    """List data sets, or prepare some: fetch, tokenise and cache.

    Example: langevin data prepare stories text8
    """

    what: tyro.conf.Positional[Literal["list", "prepare"]] = "list"
    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Names, text files or folders of text files."""
    tokenizer: str | None = None
    """bytes, chars, bpe-N, or a transformers tokenizer; default: what suits the data."""
    json: bool = False
    """Print the list as JSON."""

    def run(self) -> int:
        from langevin.run_commands import data_command

        return data_command(self.what, self.names, self.tokenizer, self.json)


@dataclass(frozen=True)
class Train:
    """Train a language model with any mixer on any text.

    Example: langevin train --data stories --mixer "heat(t='head')" --minutes 1 --out runs/x
    """

    settings: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)
    out: Path | None = None
    """The run folder; default: runs/DATA-MIXER-SEED."""
    config: Path | None = None
    """A YAML file of settings, such as another run's config.yaml; flags on the command line go first."""
    resume: Literal["never", "auto"] = "never"
    """auto: go on from the last whole checkpoint of the run folder, if there is one."""
    seeds: str | None = None
    """Several runs, 0-2 or 0,3,5, one after another."""
    dry_run: bool = False
    """Print parameters, FLOPs and memory, and train nothing."""

    def run(self) -> int:
        from langevin.run_commands import train_command

        return train_command(self.settings, self.out, self.resume == "auto", self.seeds, self.dry_run)


@dataclass(frozen=True)
class Evaluate:
    """Loss, perplexity, bits per character and calibration of a run's best model, with intervals."""

    path: tyro.conf.Positional[Path]
    """A run folder."""
    split: Literal["test", "valid"] = "test"
    stride: int | None = None
    """Tokens between windows; default: half the context."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        from langevin.run_commands import evaluate_command

        return evaluate_command(self.path, self.split, self.stride, self.json)


@dataclass(frozen=True)
class Generate:
    """Write texts with a run's best model, as they come.

    A prompt and a seed give the same text in any batch.

    Example: langevin generate runs/x --prompt "Once upon a time" "The dog" --samples 3
    """

    run_folder: tyro.conf.Positional[Path]
    """A run folder."""
    prompt: tuple[str, ...] = ()
    """One or more beginnings; none: from nothing."""
    tokens: int = 200
    """The most tokens to add."""
    temperature: float = 0.8
    """0: always the likeliest token."""
    top_k: int = 0
    """Choose among the k likeliest; 0: all."""
    top_p: float = 1.0
    """Choose among the fewest that hold this probability."""
    samples: int = 1
    """Texts for each prompt."""
    stop: tuple[str, ...] = ()
    """Strings that end a text."""
    seed: int = 0
    """Of the first sample; each further one takes the next number."""
    batch: int = 16
    """Texts written at the same time."""
    json: bool = False
    """Print JSON when all are done."""

    def run(self) -> int:
        from langevin.run_commands import generate_command

        return generate_command(self)


@dataclass(frozen=True)
class Plot:
    """Draw run folders: curves, reliability (after evaluate), attention, times (learned scalars)."""

    what: tyro.conf.Positional[Literal["curves", "reliability", "attention", "times"]]
    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Run folders."""
    out: Path | None = None
    """PNG, SVG or PDF; default: figures/ in the first run folder."""
    text: str = "Once upon a time"
    """attention: what the model reads."""
    layer: int = 0
    head: int = 0

    def run(self) -> int:
        from langevin.run_commands import plot_command

        return plot_command(self)
