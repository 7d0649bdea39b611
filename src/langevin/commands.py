"""What the commands do once parsed: call the library, show tables, decide the exit status."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.status import Status
from rich.table import Table

from langevin.errors import UsageError
from langevin.runs import quiet_transformers

if TYPE_CHECKING:
    from langevin.cli_mixers import Bench

# What `bench` measures of a mixer when no spec is named, where that is not the bare name.
BENCHED = {"heat": ["heat(t=0.28)", "heat(t='adaptive')", "heat(t=0.16, alpha=1.0)"]}


OBJECTIVES = {"ar": "predict the next token"}
TASKS = {"lm": "language modelling"}


def list_command(kind: str, as_json: bool) -> int:
    from langevin import data, mixers
    from langevin.mixers.spec import ALIASES, MIXERS, WRAPPERS, make

    rows: list[dict[str, Any]]
    if kind in ("objectives", "tasks"):
        known = OBJECTIVES if kind == "objectives" else TASKS
        rows = [{"name": name, "about": about} for name, about in known.items()]
    elif kind == "data":
        rows = [asdict(row) for row in data.names()]
    elif kind == "recipes":
        from langevin.studies import recipe

        rows = [dict(row) for row in recipe.described()]
    elif kind == "aliases":
        rows = [
            {"name": alias, "means": str(mixers.Spec(make(MIXERS[name], values)))}
            for alias, (name, values) in ALIASES.items()
        ]
    else:
        configs = {n: MIXERS[n] for n in mixers.names()} if kind == "mixers" else WRAPPERS
        rows = [_described(name, config) for name, config in configs.items()]
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    print_rows(rows)
    return 0


def print_rows(rows: list[dict[str, Any]]) -> None:
    table = Table(*rows[0], box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    console_for().print(table)


def _described(name: str, config: type) -> dict[str, str]:
    keys = ", ".join(f"{f.name}={f.default!r}" for f in fields(config))
    text = (sys.modules[config.__module__].__doc__ or "").strip().partition("\n")[0]
    return {"name": name, "keys": keys or "-", "about": text.rstrip(".")}


def check_command(
    targets: tuple[str, ...], against: str | None, only: list[str] | None, as_json: bool
) -> int:
    from langevin.check import check
    from langevin.mixers import examples

    quiet_transformers()
    console = console_for(stderr=True)
    reports = []
    for target in targets or examples():
        with console.status(f"checking {target}") as status:

            def progress(name: str, target: str = target, status: Status = status) -> None:
                status.update(f"checking {target}: {name}")

            report = check(target, against=against, only=only, progress=progress)
        reports.append(report)
        if not as_json and targets:
            _print_report(report)
    if as_json:
        print(json.dumps([report.as_dict() for report in reports], indent=2))
    elif not targets:
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


def bench_command(options: Bench) -> int:
    from langevin import mixers
    from langevin.bench import Settings, bench_mixers

    settings = Settings(
        lengths=options.lengths,
        width=options.width,
        heads=options.heads,
        tokens=options.tokens,
        causal=not options.bidirectional,
        device=options.device,
        dtype=options.dtype,
        compile=options.compile,
        repeats=options.repeats,
    )
    _check_folder(options.json)
    specs = list(options.specs) or [v for n in mixers.names() for v in BENCHED.get(n, [n])]
    console = console_for(stderr=True)
    with console.status("measuring") as status:
        result = bench_mixers(specs, settings, progress=status.update)
    for part, about in (
        ("module", "x to x, with projections and rotary positions"),
        ("core", "q, k, v to mixed values"),
    ):
        _print_bench(part, about, [row for row in result["rows"] if row["part"] == part])
    console_for().print(
        f"{result['machine']['device']}, {settings.dtype}, torch {result['machine']['torch']}; "
        f"median of {settings.repeats} ± interquartile range; × softmax: median of run-by-run ratios; "
        "MiB: peak of forward and backward",
        style="dim",
    )
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
        console.print(f"wrote {options.json}")
    return 0


def bench_training_command(options: Bench) -> int:
    from langevin import mixers
    from langevin.bench_training import bench_training
    from langevin.training.config import TrainConfig

    _check_folder(options.json)
    config = TrainConfig(
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        context=options.context,
        batch=options.batch,
        optimizer=options.optimizer,
        positions=options.positions,
        checkpointing=options.checkpointing,
        device=options.device,
    )
    specs = list(options.specs) or mixers.names()
    with console_for(stderr=True).status("measuring") as status:
        result = bench_training(
            specs, config, vocab=options.vocab, rounds=options.repeats, progress=status.update
        )
    table = Table(title="training steps", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("mixer", no_wrap=True)
    for name in ("parameters", "tokens/s", "± IQR", "× softmax", "loop / bare", "TFLOP/s", "of matmul"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["rows"]:
        table.add_row(
            row["mixer"],
            f"{row['parameters']:,}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['spread']:,.0f}",
            f"{row['ratio']:.3f}",
            f"{row['host_ratio']:.3f}",
            f"{row['flops'] / 1e12:.3g}",
            f"{row['of_matmul']:.1%}",
        )
    console_for().print(table)
    about = f"{result['machine']['device']}, torch {result['machine']['torch']}; a large matrix product: "
    about += f"{result['matmul FLOP/s'] / 1e12:.3g} TFLOP/s; medians of {options.repeats} rounds in turn"
    console_for().print(about, style="dim")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _check_folder(file: Path | None) -> None:
    if file is not None and not file.parent.is_dir():
        raise UsageError(f"no such folder: {file.parent}", "Make it first.")


def _print_bench(part: str, about: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"{part}: {about}", title_justify="left", box=box.SIMPLE_HEAD)
    table.padding = (0, 1, 0, 0)
    table.add_column("mixer", no_wrap=True)
    for name in ("forward ms", "×", "fwd+bwd ms", "×", "MiB", "×"):
        table.add_column(name, justify="right", no_wrap=True)
    length = None
    for row in rows:
        if length != row["length"]:
            length = row["length"]
            table.add_row(f"[bold]{length:,} tokens[/] × {row['batch']}")
        table.add_row(
            row["mixer"],
            _with_spread(row["forward_ms"], row["forward_spread_ms"]),
            f"{row['forward_ratio']:.2f}",
            _with_spread(row["both_ms"], row["both_spread_ms"]),
            f"{row['both_ratio']:.2f}",
            f"{row['peak_mib']:.0f}",
            f"{row['peak_ratio']:.2f}",
        )
    console_for().print(table)


def _with_spread(median: float, spread: float) -> str:
    return f"{median:.2f} ±{100 * spread / median:.0f}%"


def convert_command(model: str, spec: str, out: Path) -> int:
    from langevin.mixers import parse

    parse(spec)  # a wrong spec should not wait for the model to load
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty", "Choose another --out, or empty it.")
    from langevin.models.convert import convert, from_pretrained

    quiet_transformers()
    with console_for(stderr=True).status(f"converting {model}"):
        converted = convert(from_pretrained(model), spec)
        converted.save_pretrained(out)
    print(f"{out}: {type(converted).__name__} with {parse(spec)}")
    print(f'Load it with langevin.from_pretrained("{out}"); test it with langevin check {out}')
    return 0


def doctor_command() -> int:
    import torch
    import transformers

    from langevin import __version__
    from langevin.environment import can_compile

    table = Table("what", "found", show_header=False)
    table.add_row("langevin", __version__)
    table.add_row("python", platform.python_version())
    table.add_row("torch", torch.__version__)
    table.add_row("transformers", transformers.__version__)
    table.add_row("CPU threads", str(torch.get_num_threads()))
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        table.add_row("GPU", f"{torch.cuda.get_device_name()} ({memory:.0f} GiB)")
    else:
        table.add_row("GPU", "none that torch sees")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table.add_row("compiler", "found" if can_compile(device) else "none: torch.compile cannot be used")
    console_for().print(table)
    return check_command(("softmax",), None, ["no future leak", "gradients"], False)


def console_for(stderr: bool = False) -> Console:
    """Wide enough for a table when the output is a file."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=stderr, highlight=False, width=140)
    return console
