"""The command line. Nothing heavy is imported before a command runs, so help is instant.

Exit status: 0 done, 1 the work failed (or a check did), 2 the command was wrong.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from langevin import __version__
from langevin.errors import UsageError, WorkError
from langevin.studies.metrics import DEFAULT as METRICS
from langevin.training.config import TrainConfig


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


@dataclass(frozen=True)
class Compare:
    """Train several mixers on equal terms and say which is better, and how sure that is.

    Every arm sees the same tokens in the same order with the same schedule, once for each seed; runs are
    paired by seed. Started again on the same folder, it goes on where it stopped.

    Example: langevin compare softmax ssmax "warm=heat(t=0.28)" --data stories --tokens 300000 --seeds 0-5
    """

    arms: tyro.conf.Positional[tuple[str, ...]] = ()
    """Mixer specs, the first being what the others are compared with; name=spec gives one a name."""
    settings: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)
    out: Path | None = None
    """The folder of the comparison; default: runs/compare-DATA."""
    seeds: str = "0-5"
    """0-5 or 0,3,5. With fewer than six no verdict is given."""
    tune: Literal["lr"] | None = None
    """lr: try the same number of learning rates for every arm, and take the best on validation."""
    trials: int = 5
    """Learning rates tried for each arm: --lr times powers of two."""
    equalise: bool = False
    """Match the parameters of the first arm by the width of the MLPs."""
    metrics: tuple[str, ...] = METRICS
    """What to report."""
    primary: str = "nll"
    """The metric that the verdict is about."""
    test_tokens: int = 65_536
    """Test tokens that each run is scored on."""
    workers: int | None = None
    """Processes; default: one a core, or as many as share a GPU. 0: this one."""
    on: Literal["local", "ray"] = "local"
    """ray: send the runs to a Ray cluster (extra `ray`), which must see the same folder."""
    open: bool = False
    """Open the report in a browser, where there is a screen."""
    title: str = ""
    quiet: bool = False
    """Show no progress."""

    def run(self) -> int:
        from langevin.study_commands import compare_command

        return compare_command(self)


@dataclass(frozen=True)
class Report:
    """Write the report of any run folders: train's, or a comparison's.

    Runs that differ in their seed alone are one arm; the others are compared with the first folder's.

    Example: langevin report runs/softmax-0 runs/softmax-1 runs/heat-0 runs/heat-1 --out report
    """

    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Run folders, folders of seeds, or one folder made by compare."""
    out: Path | None = None
    """Where to write; default: report, or the folder of the comparison itself."""
    metrics: tuple[str, ...] = METRICS
    """What to report."""
    primary: str = "nll"
    """The metric that the verdict is about."""
    title: str = ""

    def run(self) -> int:
        from langevin.study_commands import report_command

        return report_command(self)


@dataclass(frozen=True)
class Reproduce:
    """Try a published claim again, and say whether it held.

    langevin list recipes shows what each recipe re-tests and what it costs. Started again on the same
    folder, it goes on where it stopped.

    Example: langevin reproduce ssmax-text8 --scale smoke
    """

    name: tyro.conf.Positional[str]
    """A recipe."""
    scale: Literal["smoke", "small", "full"] = "smoke"
    """smoke: does it run, on any machine; small: an answer from one GPU; full: the published size."""
    seeds: str | None = None
    """0-5 or 0,3,5; default: the recipe's. With fewer than six no claim is judged."""
    out: Path | None = None
    """The folder; default: runs/NAME-SCALE."""
    workers: int | None = None
    """Processes; default: one a core, or as many as share a GPU. 0: this one."""
    on: Literal["local", "ray"] = "local"
    """ray: send the runs to a Ray cluster (extra `ray`), which must see the same folder."""
    quiet: bool = False
    """Show no progress."""

    def run(self) -> int:
        from langevin.study_commands import reproduce_command

        return reproduce_command(self)


@dataclass(frozen=True)
class Doctor:
    """Say what this machine has and whether langevin works on it."""

    def run(self) -> int:
        from langevin.commands import doctor_command

        return doctor_command()


COMMANDS: dict[str, Callable[..., Any]] = {
    "list": ListNames,
    "check": Check,
    "bench": Bench,
    "convert": Convert,
    "data": Data,
    "train": Train,
    "evaluate": Evaluate,
    "generate": Generate,
    "plot": Plot,
    "compare": Compare,
    "report": Report,
    "reproduce": Reproduce,
    "doctor": Doctor,
}


def _parse(arguments: list[str]) -> Any:
    from tyro.extras import subcommand_cli_from_dict

    if arguments[:1] == ["train"] and "--config" in arguments[:-1]:
        file = Path(arguments[arguments.index("--config") + 1])
        settings = TrainConfig.read(file)
        return tyro.cli(Train, prog="langevin train", default=Train(settings), args=arguments[1:])
    return subcommand_cli_from_dict(
        COMMANDS,
        prog="langevin",
        description="Train, check and fairly compare how tokens mix and how text is generated. "
        "Any command takes --debug, for a traceback.",
        args=arguments or ["--help"],
    )


def _warn(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
    """A warning in one line, without the line of source that raised it."""
    print(f"langevin: warning: {message}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"]
    warnings.showwarning = _warn
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the memory profiler announces itself otherwise
    try:
        if arguments == ["--version"]:
            print(f"langevin {__version__}")
            return 0
        command = _parse(arguments)
        return int(command.run())
    except (UsageError, WorkError) as error:
        if debug:
            raise
        print(f"langevin: {error.cause}", file=sys.stderr)
        if error.remedy:
            print(error.remedy, file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print("langevin: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if debug:
            raise
        print(f"langevin: {error}", file=sys.stderr)
        return 1
