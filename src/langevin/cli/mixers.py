"""The commands about mixers: list, check, bench, convert, doctor."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import tyro
from rich import box
from rich.table import Table

from langevin.cli.tables import check_file, console_for, print_pairs, print_rows, table_of, write_numbers
from langevin.environment import without_bars
from langevin.errors import UsageError
from langevin.settings import TrainConfig, check_count

# What `bench` measures of a mixer when no spec is named, where that is not the bare name.
BENCHED = {"heat": ["heat(t=0.28)", "heat(t='adaptive')", "heat(t=0.16, alpha=1.0)"]}
# What is shown of its rows, by heading.
SHOWN = {
    "mixers": (
        ("mixer", "{mixer}"),
        ("tokens", "{batch} × {length:,}"),
        ("forward ms", "{forward_ms:.2f} ±{forward_spread_ms:.2f}"),
        ("×", "{forward_ratio:.2f}"),
        ("fwd+bwd ms", "{both_ms:.2f} ±{both_spread_ms:.2f}"),
        ("×", "{both_ratio:.2f}"),
        ("MiB", "{peak_mib:.0f}"),
        ("×", "{peak_ratio:.2f}"),
    ),
    "train": (
        ("mixer", "{mixer}"),
        ("parameters", "{parameters:,}"),
        ("tokens/s", "{tokens_per_second:,.0f}"),
        ("± IQR", "{spread:,.0f}"),
        ("× softmax", "{ratio:.3f}"),
        ("loop / bare", "{host_ratio:.3f}"),
        ("FLOP/s", "{flops:.3g}"),
        ("of matmul", "{of_matmul:.1%}"),
    ),
    "generate": (
        ("mixer", "{mixer}"),
        ("texts", "{batch}"),
        ("ms/token", "{ms_per_token:.3f}"),
        ("± range", "{spread_ms:.3f}"),
        ("× softmax", "{ratio:.2f}"),
        ("bytes kept a text", "{state_bytes:,}"),
        ("at twice the length", "{state_bytes_at_twice:,}"),
    ),
}
SHOWN |= {
    "training": (
        ("model", "{model}"),
        ("tokens", "{batch} × {length:,}"),
        ("parameters", "{parameters:,}"),
        ("MiB", "{mib:,.0f}"),
        ("a text", "{mib_a_text:,.1f}"),
        ("ms a step", "{ms_p50:,.1f}"),
        ("× softmax", "{ratio:.2f}"),
        ("tokens/s", "{tokens_per_second:,.0f}"),
    ),
    "inference": (
        ("model", "{model}"),
        ("tokens", "{batch} × {length:,}"),
        ("GFLOPs a text", "{gflops:.3g}"),
        ("MiB", "{mib:,.0f}"),
        ("ms, p50", "{ms_p50:,.2f}"),
        ("p90", "{ms_p90:,.2f}"),
        ("p99", "{ms_p99:,.2f}"),
        ("× softmax", "{ratio:.2f}"),
        ("tokens/s", "{tokens_per_second:,.0f}"),
    ),
}
SHOWN["int8"] = (
    ("model", "{model}"),
    ("tokens", "{batch} × {length:,}"),
    ("parameters", "{parameters:,}"),
    ("MiB of the file", "{mib:,.2f}"),
    *SHOWN["inference"][4:],
)
TITLES = {
    "module": "module: x to x, with projections and rotary positions",
    "core": "core: q, k, v to mixed values",
    "train": "training steps",
    "generate": "decoding",
    "training": "training steps of classifiers",
    "inference": "classifying",
    "int8": "classifying, as ONNX files in int8, on one thread of the processor",
}
NOTES = {
    "mixers": "median of {} ± interquartile range; × softmax: median of run-by-run ratios; "
    "MiB: peak of forward and backward",
    "train": "medians of {} rounds in turn; of matmul: of a large matrix product in the same run",
    "generate": "medians of {} rounds in turn",
    "edge": "{} runs in turn (p99 needs a hundred); × softmax: median of run-by-run ratios; "
    "MiB: weights and all else at the peak",
}


@dataclass(frozen=True)
class ListNames:
    """List what langevin knows by name."""

    kind: tyro.conf.Positional[
        Literal["mixers", "wrappers", "aliases", "objectives", "tasks", "data", "recipes"]
    ] = "mixers"
    """What to list."""
    json: bool = False
    """Print JSON."""

    def __call__(self) -> int:
        print_rows(_listed(self.kind), self.json)
        return 0


def _listed(kind: str) -> list[dict[str, Any]]:
    if kind == "data":
        from langevin import data

        return data.names()
    if kind == "recipes":
        from langevin.studies import recipe

        return [dict(row) for row in recipe.described()]
    if kind in ("tasks", "objectives", "wrappers"):
        package = import_module(f"langevin.{'mixers' if kind == 'wrappers' else kind}")
        rows: list[dict[str, Any]] = getattr(package, kind.upper()).described()
        return rows
    from langevin import mixers
    from langevin.registry import make, written

    if kind == "aliases":
        known = mixers.MIXERS.aliases.items()
        return [{"name": a, "means": written(make(mixers.MIXERS[n], v))} for a, (n, v) in known]
    order = mixers.names()
    return sorted(mixers.MIXERS.described(), key=lambda row: order.index(row["name"]))


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

    def __call__(self) -> int:
        from langevin.checks import check
        from langevin.mixers import examples

        console = console_for(stderr=True)
        reports = []
        for target in self.targets or examples():
            with console.status(f"checking {target}") as status:

                def progress(name: str, target: str = target, status: Any = status) -> None:
                    status.update(f"checking {target}: {name}")

                report = check(
                    target, against=self.against, only=list(self.only) or None, progress=progress
                )
            reports.append(report)
            if not self.json and self.targets:
                _print_report(report)
        if self.json:
            print(json.dumps([report.as_dict() for report in reports], indent=2))
        elif not self.targets:
            _print_matrix(reports)
        return 0 if all(report.passed for report in reports) else 1


def _print_report(report: Any) -> None:
    table = Table("property", "", "what was seen", title=report.subject, title_justify="left")
    mark = {True: "[green]pass[/]", False: "[bold red]FAIL[/]", None: "[dim]-[/]"}
    for row in report.rows:
        table.add_row(row.property, mark[row.passed], row.detail)
    console_for().print(table)


def _print_matrix(reports: list[Any]) -> None:
    """One line per subject, one numbered column per property; failures in full below."""
    columns = list(dict.fromkeys(row.property for report in reports for row in report.rows))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("mixer", no_wrap=True)
    for number in range(1, len(columns) + 1):
        table.add_column(str(number), justify="right")
    mark = {True: "[green]✓[/]", False: "[bold red]✗[/]", None: "[dim]-[/]"}
    for report in reports:
        found = {row.property: mark[row.passed] for row in report.rows}
        table.add_row(report.subject, *(found.get(name, mark[None]) for name in columns))
    console = console_for()
    console.print(table)
    legend = "   ".join(f"{i} {name}" for i, name in enumerate(columns, 1))
    console.print(f"{legend}\n✓ holds   ✗ fails   - not offered by this mixer", style="dim")
    for report in reports:
        for row in report.rows:
            if row.passed is False:
                console.print(f"[bold red]FAIL[/] {report.subject}: {row.property}: {row.detail}")


@dataclass(frozen=True)
class Bench:
    """Measure time and peak memory of mixers, as ratios to plain softmax in the same run.

    mixers: the mixing alone, forward and backward, at several lengths. train: whole training steps.
    generate: a token of the texts that langevin generate writes. edge: classifiers of as many parameters,
    and one of DistilBERT's shape: memory, time and FLOPs by the length of texts.

    Examples: langevin bench mixers ssmax "heat(t=0.28)" --lengths 1024 4096 --device cuda --compile ;
    langevin bench train ssmax sigmoid --layers 4 --width 256 --context 256 --batch 32 --vocab 50257 ;
    langevin bench edge --width 128 --vocab 30000 --lengths 128 512 --repeats 100 --plot pictures
    """

    what: tyro.conf.Positional[Literal["mixers", "train", "generate", "edge"]] = "mixers"
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
    """mixers, edge: sequence lengths."""
    tokens: int = 2048
    """mixers: tokens per batch: the batch is tokens // length, at least 1."""
    bidirectional: bool = False
    """mixers: measure without causality."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """mixers, generate, edge: the type of inputs and weights (edge: of training, that of autocast)."""
    compile: bool = False
    """mixers, edge: measure under torch.compile (train does it on a GPU)."""

    layers: int = 4
    """train, generate, edge: layers of the model."""
    context: int = 256
    """train: tokens a sequence; generate: twice those of the prompt."""
    batch: int = 32
    """train: sequences a step; generate, edge: texts at a time, beside one alone."""
    vocab: int = 256
    """train, generate, edge: size of the vocabulary."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """train: the optimiser."""
    positions: Literal["none", "learned", "sinusoidal", "rope", "alibi"] = "rope"
    """train, edge: the positions."""
    checkpointing: bool = False
    """train: compute activations again in the backward pass."""
    int8: bool = False
    """edge: also as ONNX files in int8, on one thread of the processor."""
    plot: Path | None = None
    """edge: also draw memory and time by length into this folder."""

    def __call__(self) -> int:
        for name in ("width", "heads", "repeats", "tokens", "layers", "context", "batch", "vocab"):
            check_count(name, getattr(self, name))
        if not self.lengths:
            raise UsageError("--lengths names no length", "Give one or more, such as --lengths 256 1024.")
        for length in self.lengths:
            check_count("length", length)
        check_file(self.json)
        if self.what == "edge" and self.plot is not None:
            there = next(place for place in (self.plot, *self.plot.absolute().parents) if place.exists())
            if not there.is_dir():
                raise UsageError(f"{there} is no folder", "Choose another --plot.")
        with console_for(stderr=True).status("measuring") as status:
            result = self._measured(status.update)
        for part in dict.fromkeys(row.get("part", self.what) for row in result["rows"]):
            columns = SHOWN.get(part) or SHOWN[self.what]
            table = table_of(TITLES[part], *(name for name, _ in columns))
            for row in result["rows"]:
                if row.get("part", self.what) == part:
                    table.add_row(*(form.format(**row) for _, form in columns))
            console_for().print(table)
        machine = f"{result['machine']['device']}, torch {result['machine']['torch']}"
        console_for().print(f"{machine}; {NOTES[self.what].format(self.repeats)}", style="dim")
        for what in result.get("left_out", ()):
            print(f"does not fit, or takes too long: {what}")
        write_numbers(result, self.json)
        if self.what == "edge" and self.plot is not None:
            from langevin.bench.edge import draw

            print("wrote " + ", ".join(map(str, draw(result["rows"], self.plot))))
        return 0

    def _measured(self, progress: Callable[[str], None]) -> dict[str, Any]:
        from langevin import mixers

        specs = list(self.specs)
        if self.what == "mixers":
            from langevin.bench.mixers import Settings, bench_mixers

            own = {f.name: getattr(self, f.name) for f in fields(Settings) if hasattr(self, f.name)}
            specs = specs or [v for n in mixers.names() for v in BENCHED.get(n, [n])]
            return bench_mixers(specs, Settings(**own, causal=not self.bidirectional), progress)
        shared = [name for name in vars(self) if name in TrainConfig.__dataclass_fields__]
        shared = [name for name in shared if name not in ("tokens", "compile")]  # they are of mixers
        config = TrainConfig(**{name: getattr(self, name) for name in shared})
        options: dict[str, Any] = {"vocab": self.vocab, "progress": progress}
        if self.what == "edge":
            from langevin.bench.edge import bench_edge

            options |= {"lengths": self.lengths, "dtype": self.dtype, "repeats": self.repeats}
            return bench_edge(specs, config, compiled=self.compile, int8=self.int8, **options)
        specs = specs or mixers.names()
        options["rounds"] = self.repeats
        if self.what == "train":
            from langevin.bench.training import bench_training

            return bench_training(specs, config, **options)
        from langevin.bench.decoding import bench_decoding

        batches = tuple(dict.fromkeys((1, self.batch)))
        return bench_decoding(specs, config, batches=batches, dtype=self.dtype, **options)


@dataclass(frozen=True)
class Convert:
    """Put a mixer into a saved transformers model.

    Example: langevin convert path/to/gpt2 "softmax+drift" --out converted
    """

    model: tyro.conf.Positional[str]
    """A folder made by save_pretrained, a run, or a name on the Hugging Face Hub."""
    spec: tyro.conf.Positional[str]
    """The mixer, for example "heat(t='head')"."""
    out: Path
    """The folder to write."""
    layers: str | None = None
    """Only these layers, for example 0,2,5."""

    def __call__(self) -> int:
        from langevin.models.pretrained import located, save_tokenizer

        # A wrong name should not wait for torch, nor a wrong spec for the model.
        model = located(self.model)
        if self.out.exists() and any(self.out.iterdir()):
            raise UsageError(f"{self.out} is not empty", "Choose another --out, or empty it.")
        if self.layers is not None and not re.fullmatch(r"\d+(,\d+)*", self.layers):
            raise UsageError(f"--layers {self.layers} are not numbers of layers", "Write them as 0,2,5.")
        layers = None if self.layers is None else [int(number) for number in self.layers.split(",")]
        from langevin.mixers import parse
        from langevin.models.convert import convert, from_pretrained

        parse(self.spec)
        with console_for(stderr=True).status(f"converting {self.model}"), without_bars():
            converted = convert(from_pretrained(model), self.spec, layers=layers)
            converted.save_pretrained(self.out)
            save_tokenizer(model, self.out)
        print(f"{self.out}: {type(converted).__name__} with {parse(self.spec)}")
        print(
            f'Load it with langevin.from_pretrained("{self.out}"); test it with langevin check {self.out}'
        )
        return 0


@dataclass(frozen=True)
class Doctor:
    """Say what this machine has and whether langevin works on it."""

    def __call__(self) -> int:
        import torch

        from langevin.environment import can_compile, environment

        device = "cuda" if torch.cuda.is_available() else "cpu"
        found: dict[str, Any] = {**environment(device), "GPU": "none that torch sees"}
        if device == "cuda":
            memory = torch.cuda.get_device_properties(0).total_memory / 2**30
            found["GPU"] = f"{torch.cuda.get_device_name()} ({memory:.0f} GiB)"
        found["compiler"] = "found" if can_compile(device) else "none: torch.compile cannot be used"
        print_pairs(found)
        return Check(("softmax",), only=("no future leak", "gradients"))()
