"""The commands about classifiers: predict (the class of a text, or of every row of a table) and export.

What runs an exported file imports neither torch nor what needs it. Rows are written as they are done, into
a file beside the one asked for that is named by the model, the table and its column: the same command goes
on behind the last whole batch in it.
"""

import csv
import io
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import tyro

from langevin.cli import exported
from langevin.cli.tables import check_file, check_folder, console_for, table_of, write_numbers
from langevin.errors import UsageError, WorkError
from langevin.settings import check_count

AT_ONCE = 1024  # rows that are read, sorted by length, and written
Classify = Callable[[list[str]], Any]  # texts to the probabilities of classes


@dataclass(frozen=True)
class Predict:
    """Say which class texts or images are of, with calibrated probabilities.

    Example: langevin predict runs/x --text "I would see it again."

    Example: langevin predict runs/x --file in.csv --text-column review --out out.csv

    Example: langevin predict runs/y --image cat.jpg dog.png

    Example: langevin predict runs/x/export/model-int8.onnx --text "I would see it again."
    """

    model: tyro.conf.Positional[Path]
    """A run folder, or a file made by langevin export."""
    text: tuple[str, ...] = ()
    """One or more texts."""
    image: tuple[str, ...] = ()
    """One or more files of images, for a run of the task images."""
    file: Path | None = None
    """A CSV, TSV, JSONL or Parquet file, each row of which, a text or an image's path, is classified."""
    out: Path | None = None
    """The CSV file to write: a line a row, with its class and the probability of every class."""
    text_column: str | None = None
    """The column of the file that holds the texts; default: that of the training data, or text."""
    checkpoint: str = "best"
    """best: the model with the lowest validation loss; last; or the number of a step that was kept."""
    batch: int = 64
    """Texts at a time."""
    device: str = "auto"
    json: bool = False
    """Print JSON."""

    def __call__(self) -> int:
        check_count("batch", self.batch)
        if bool(self.text) + bool(self.image) + (self.file is not None) != 1:
            raise UsageError(
                "one of texts, images or a file is classified", "Give --text, --image or --file."
            )
        if (self.file is None) != (self.out is None):
            raise UsageError("--file and --out go together", "Give both: --file in.csv --out out.csv.")
        if self.file is not None and self.json:
            raise UsageError("--file writes a CSV file, and no JSON", "Leave --json out.")
        exported.check_texts(self.text)
        check_file(self.out)
        if self.file is not None and not self.file.is_file():
            if self.file.exists() or str(self.file) == "-":
                raise UsageError(
                    f"--file wants a file, which is read twice, not {self.file}",
                    "Save the rows in one, such as in.csv.",
                )
            raise UsageError(f"no such file: {self.file}", "Check the path.")
        classify, names, column, digest = self._opened()
        if self.file is None or self.out is None:
            given = list(self.text or self.image)
            exported.show("text" if self.text else "image", given, names, classify(given), self.json)
            return 0
        from langevin.runs.files import sha256

        model = sha256(self.model) if digest is None else digest
        return predict_file(self.file, self.text_column or column, self.out, classify, names, model)

    def _opened(self) -> tuple[Classify, list[str], str | None, str | None]:
        """What classifies texts, the names of the classes, the usual column of texts, and a run's hash."""
        if self.model.suffix == ".onnx":
            if self.image:
                raise UsageError("an exported file reads texts", "Give --text or --file.")
            if (self.checkpoint, self.device) != ("best", "auto"):
                raise UsageError("an exported file has no --checkpoint or --device", "Leave them out.")
            classify = exported.opened(self.model, self.batch)
            return classify, classify.names, classify.text_column, None
        from langevin.environment import pick_device
        from langevin.evaluation.classes import classifier

        run = opened(self.model, self.checkpoint)
        reads = run.task.reads
        if self.file is None and not getattr(self, reads):
            raise UsageError(f"{self.model} classifies {reads}s", f"Give --{reads}.")
        classify, names = classifier(run, pick_device(self.device), self.batch)
        return classify, names, getattr(run.task, "text_column", None), run.model_sha256


def opened(folder: Path, checkpoint: str, data: str | None = None) -> Any:
    """A run of a task that has classes."""
    from langevin.runs import load

    run = load(folder, checkpoint=checkpoint, data=data)
    if run.task.used_by != "predict":
        raise UsageError(
            f"{folder} is a run of the task {run.task.name}, which has no classes",
            f"Use langevin {run.task.used_by or 'evaluate'}.",
        )
    return run


@dataclass(frozen=True)
class Export:
    """Write a trained classifier as a file that runs without torch, with its tokenizer and labels.

    The file is kept after it has said of the texts of a split what PyTorch says. Told are its size, its
    time for one text of 128 tokens on one thread, the peak memory of a process that runs it, and what
    becomes of the accuracy.

    Example: langevin export runs/x --int8
    """

    run_folder: tyro.conf.Positional[Path]
    """A run folder."""
    format: Literal["onnx"] = "onnx"
    int8: bool = False
    """Also write a file with weights of 8 bits: a quarter of the size."""
    out: Path | None = None
    """The folder to write; default: export/ in the run folder."""
    split: Literal["valid", "test"] = "valid"
    """The texts on which the files are compared with PyTorch."""
    limit: int | None = None
    """So many of them, drawn."""
    data: str | None = None
    """Where the data are now, if they were moved: they must be the same."""
    checkpoint: str = "best"
    """best: the model with the lowest validation loss; last; or the number of a step that was kept."""
    json: Path | None = None
    """Also write every number to this file."""

    def __call__(self) -> int:
        if self.limit is not None:
            check_count("limit", self.limit)
        out = self.run_folder / "export" if self.out is None else self.out
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"{out} is not empty", "Choose another --out, or empty it.")
        run = opened(self.run_folder, self.checkpoint, self.data)
        if run.model.main_input_name != "input_ids":
            raise UsageError(
                f"{self.run_folder} reads images, which are not exported", "Export a run on texts."
            )
        check_folder(out)
        check_file(self.json)
        from langevin.export.to_onnx import export

        with console_for(stderr=True).status("reading") as status:
            rows = export(
                run, out, int8=self.int8, split=self.split, limit=self.limit, progress=status.update
            )
        heads = ("MB", "ms, p50", "p90", "peak MB", "accuracy", "change", "same class", "largest Δp")
        table = table_of(None, "model", *heads)
        for row in rows:
            size, peak = row["bytes"], row["peak_mb"]
            table.add_row(
                row["model"],
                "" if size is None else f"{size / 1e6:.2f}",
                f"{row['ms_p50']:.2f}",
                f"{row['ms_p90']:.2f}",
                "" if peak is None else f"{peak:.0f}",
                f"{row['accuracy']:.2%}",
                f"{100 * row['accuracy_change']:+.2f}",
                f"{row['same_label']:.2%}",
                f"{row['largest_difference']:.1e}",
            )
        console_for().print(table)
        told = f"{rows[0]['texts']:,} texts of {self.split}; one text of up to 128 tokens, one thread"
        console_for().print(told, style="dim")
        write_numbers({"rows": rows}, self.json)
        best = "model-int8.onnx" if self.int8 else "model.onnx"
        print(f'{out}\nNext: langevin predict {out / best} --text "..."')
        return 0


def predict_file(
    file: Path, column: str | None, out: Path, classify: Classify, names: list[str], model: str
) -> int:
    """Write the class of every row of a table; a row without a text has none."""
    from langevin.data import tables
    from langevin.runs.files import sha256

    def texts() -> Iterator[str]:
        return (text.strip() for (text,) in tables.records(file, [column or tables.USUAL_COLUMN]))

    if out.exists():
        raise UsageError(f"{out} is there already", "Choose another --out, or remove it.")
    if not tables.is_table(file):
        raise UsageError(f"{file} is no table", f"A table's name ends with {', '.join(tables.SUFFIXES)}.")
    total = sum(1 for _ in texts())
    key = f"{model} {sha256(file)} {column} {names}"
    part = out.with_name(f".{out.name}.{zlib.crc32(key.encode()):08x}.part")
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    kept = _written(part) or [["row", "label", "probability", *names]]
    done = (len(kept) - 1) // AT_ONCE * AT_ONCE  # the same texts as ever stand in a batch
    try:
        with (
            open(part, "w", encoding="utf-8", newline="") as target,
            Progress(*columns, console=console_for(stderr=True), transient=True) as bar,
        ):
            task = bar.add_task("classifying", total=total, completed=done)
            writer, rest = csv.writer(target), islice(texts(), done, None)
            writer.writerows(kept[: 1 + done])
            while some := list(islice(rest, AT_ONCE)):
                real = [text for text in some if text]
                found = iter(classify(real) if real else ())
                for text in some:
                    done += 1
                    shares = list(map(float, next(found))) if text else []
                    label = names[shares.index(max(shares))] if text else ""
                    told = [f"{share:.6f}" for share in (max(shares), *shares)] if text else []
                    writer.writerow([done, label, *(told or [""] * (len(names) + 1))])
                target.flush()
                bar.update(task, completed=done)
        os.replace(part, out)
    except OSError as error:
        raise WorkError(f"{out} cannot be written: {error.strerror}", "Choose another --out.") from error
    print(f"{done:,} rows in {out}")
    return 0


def _written(part: Path) -> list[list[str]]:
    """The whole rows of a file that was not finished."""
    if not part.exists():
        return []
    text = part.read_bytes().decode("utf-8", "replace")
    rows = list(csv.reader(io.StringIO(text, newline="")))
    return rows if text.endswith("\r\n") else rows[:-1]
