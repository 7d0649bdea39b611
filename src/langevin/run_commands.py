"""The commands about runs: data, train, evaluate, generate, plot."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.status import Status
from rich.table import Table

from langevin.commands import console_for, list_command
from langevin.errors import UsageError
from langevin.runs import quiet_transformers

if TYPE_CHECKING:
    from langevin.cli_runs import Generate, Plot
    from langevin.training.config import TrainConfig


def train_command(
    config: TrainConfig, out: Path | None, resume: bool, seeds: str | None, dry_run: bool
) -> int:
    from langevin.runs import train
    from langevin.training.start import default_folder, estimate

    quiet_transformers()
    if dry_run:
        _print_pairs(estimate(config))
        return 0
    numbers = read_seeds(seeds) if seeds is not None else [config.seed]
    for seed in numbers:
        one = replace(config, seed=seed)
        folder = out or default_folder(one)
        folder = folder / f"seed-{seed}" if seeds is not None and out is not None else folder
        run, signal = train(one, folder, resume=resume)
        last = run.metrics("valid")[-1:] or [{"loss": float("nan")}]
        if signal is not None:
            print(f"{run.path}: stopped at step {_last_step(run)}; go on with --resume auto")
            return 130
        print(f"{run.path}: validation loss {last[0]['loss']:.4f} nats per token at the end")
        print(f"Next: langevin evaluate {run.path}; langevin generate {run.path}")
    return 0


def _last_step(run: Any) -> int:
    rows = run.metrics()
    return int(rows[-1]["step"]) if rows else 0


def read_seeds(text: str) -> list[int]:
    """'0-2' or '0,3,5' -> numbers."""
    try:
        if "-" in text:
            first, _, last = text.partition("-")
            found = list(range(int(first), int(last) + 1))
        else:
            found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found:
        raise UsageError(f"--seeds {text} names no seeds", "Write 0-2 or 0,3,5.")
    return found


def evaluate_command(path: Path, split: str, stride: int | None, as_json: bool) -> int:
    from langevin.evaluation.runs import evaluate
    from langevin.runs import load
    from langevin.training.start import pick_device

    quiet_transformers()
    run = load(path)
    with console_for(stderr=True).status(f"evaluating {path} on {split}"):
        result = evaluate(run, split, stride=stride, device=pick_device("auto"))
    if as_json:
        print(json.dumps(result, indent=1))
        return 0
    table = Table(box=box.SIMPLE_HEAD, title=f"{path} on {split}", title_justify="left")
    table.add_column("metric")
    table.add_column("value", justify="right")
    table.add_column("95 % interval", justify="right")
    table.add_column("floor", justify="right")
    if result["true_nats_per_token"] is not None:
        table.add_row("nll of the true distribution", f"{result['true_nats_per_token']:.4f}")
    for name, value in result["likelihood"].items():
        _add_estimate(table, name, value)
    scaled = result["calibration at that temperature"]
    for name in ("ece", "adaptive_ece", "brier", "top1_brier"):
        floor = result["calibration"].get(f"{name}_floor")
        _add_estimate(table, name, result["calibration"][name], floor)
    temperature = result["temperature"]["fitted on validation"]
    _add_estimate(table, f"ece at temperature {temperature:.3f}", scaled["ece"], scaled.get("ece_floor"))
    console_for().print(table)
    print(f"{result['tokens']:,} tokens, each scored once; floor: the mean ECE of a calibrated model")
    print(f"Everything is in {path / f'evaluation-{split}.json'}")
    return 0


def _add_estimate(table: Table, name: str, value: Any, floor: Any = None) -> None:
    if not isinstance(value, dict) or "value" not in value:
        return
    low, high = value.get("low"), value.get("high")
    interval = "" if low is None or high is None else f"{low:.4f} to {high:.4f}"
    at = f"{floor['mean']:.4f}" if isinstance(floor, dict) and "mean" in floor else ""
    table.add_row(name.replace("_", " "), f"{value['value']:.4f}", interval, at)


def generate_command(options: Generate) -> int:
    import transformers
    from transformers import TextStreamer

    from langevin.generation import Request, Sampling, Text, generate
    from langevin.runs import load
    from langevin.training.start import pick_device

    quiet_transformers()
    sampling = Sampling(options.tokens, options.temperature, options.top_k, options.top_p, options.stop)
    if options.samples < 1 or options.batch < 1:
        raise UsageError("samples and batch must be 1 or more")
    run = load(options.run_folder)
    model, tokenizer = run.model.to(pick_device("auto")), run.tokenizer
    transformers.utils.logging.set_verbosity_error()  # its reminders would stand amid the text
    longest = max(len(tokenizer(prompt).input_ids) for prompt in options.prompt or ("",)) + options.tokens
    if longest > run.config.context and model.config.positions != "learned":
        note = f"up to {longest} tokens: beyond the {run.config.context} it was trained with"
        console_for(stderr=True).print(note, style="dim")
    seeds = range(options.seed, options.seed + options.samples)
    requests = [Request(prompt, seed) for prompt in options.prompt or ("",) for seed in seeds]
    streams = len(requests) == 1 and not options.json
    file = run.path / "samples" / "samples.jsonl"
    file.parent.mkdir(exist_ok=True)
    status = Status("", console=Console(stderr=True))

    def stepped(texts: range, tokens: int) -> None:
        which = f"{texts.start + 1} to {texts.stop} of {len(requests)}"
        status.update(f"texts {which}: {tokens} of {options.tokens} tokens")

    def finished(index: int, text: Text) -> None:
        with open(file, "a") as appended:
            appended.write(json.dumps(asdict(text), ensure_ascii=False) + "\n")
        if not streams and not options.json:
            status.stop()
            print(f"--- {text.prompt!r}, seed {text.seed}\n{text.text}", flush=True)
            status.start()

    streamer = TextStreamer(tokenizer, skip_special_tokens=True) if streams else None
    try:
        if not streams:
            status.start()
        texts = generate(
            model,
            tokenizer,
            requests,
            sampling,
            batch=options.batch,
            streamer=streamer,
            finished=finished,
            stepped=stepped,
        )
    finally:
        status.stop()
    if options.json:
        print(json.dumps([asdict(text) for text in texts], indent=2, ensure_ascii=False))
    return 0


def plot_command(options: Plot) -> int:
    from langevin import figures
    from langevin.runs import load

    quiet_transformers()
    if not options.runs:
        raise UsageError("no run folder came", "Give one or more folders made by langevin train.")
    runs = [load(path) for path in options.runs]
    out = options.out or runs[0].path / "figures" / f"{options.what}.png"
    if options.what == "attention":
        figure = figures.attention(runs, options.text, options.layer, options.head)
    else:
        draw = {"curves": figures.curves, "reliability": figures.reliability, "times": figures.times}
        figure = draw[options.what](runs)
    figures.save(figure, out)
    print(out)
    return 0


def data_command(what: str, names: tuple[str, ...], tokenizer: str | None, as_json: bool) -> int:
    from langevin import data

    if what == "list":
        return list_command("data", as_json)
    if not names:
        raise UsageError("no data set was named", "See langevin data list.")
    for name in names:
        corpus = data.prepare(name, tokenizer=tokenizer)
        sizes = {
            f"{split} {what}": facts[what]
            for split, facts in corpus.manifest["splits"].items()
            for what in ("tokens", "characters", "documents")
        }
        _print_pairs({"data": name, "vocabulary": corpus.vocab_size, **sizes, "kept in": corpus.folder})
    return 0


def _print_pairs(pairs: dict[str, Any]) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    for name, value in pairs.items():
        if value is not None:
            table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    console_for().print(table)
