"""`langevin.run_experiment`: a classifier without attention in the one call of attention-free-diffusion."""

from pathlib import Path
from typing import Any

from langevin.environment import pick_device
from langevin.evaluation.runs import evaluate
from langevin.registry import written
from langevin.runs import train
from langevin.settings import TrainConfig
from langevin.tasks.classify import Classify

LISTOPS = {"lra_listops": "listops-lra"}
LISTOPS_COLUMNS = {"text_column": "Source", "label_column": "Target"}  # of basic_train.tsv and the others


def run_experiment(
    dataset_name: str = "imdb",
    batch_size: int = 32,
    epochs: float = 10,
    max_length: int = 4096,
    embed_dim: int = 256,
    num_iters: int = 4,
    alpha: float = 0.5,
    lr: float = 5e-5,
    experiment_name: str = "diffusion_experiment",
    *,
    data_dir: str | Path | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
    quiet: bool = False,
    **settings: Any,
) -> tuple[dict[str, float], Any, Path]:
    """Train a classifier with the published neighbour mixer, and measure it on test, once.

    Gives what was measured by name (accuracy, nll, ...), the model, and its run folder, which is
    runs/EXPERIMENT_NAME.

    dataset_name: imdb, ag_news, lra_listops, or whatever `langevin train --task classify` takes as data.
    data_dir: a folder with tables of the splits instead, such as the basic_*.tsv of lra_listops.
    text_column, label_column: of your own table; None for text and label.
    settings: of `langevin train`; they go first (`mixer="softmax"`, `layers=4`, `seed=1`, `out=...`).
    """
    out = Path(settings.pop("out", Path("runs") / experiment_name))
    own = dataset_name in LISTOPS and data_dir is not None
    columns = {"text_column": text_column, "label_column": label_column}
    named = {name: column for name, column in columns.items() if column is not None}
    theirs = {
        "task": written(Classify(**{**(LISTOPS_COLUMNS if own else {}), **named})),
        "data": str(data_dir or LISTOPS.get(dataset_name, dataset_name)),
        "tokenizer": "spaces" if own else None,
        "mixer": f"neighbor(iters={num_iters}, alpha={alpha})",
        **{"layers": 1, "width": embed_dim, "heads": 1, "positions": "none", "context": max_length},
        **{"batch": batch_size, "lr": lr, "schedule": "constant", "warmup": 0.0, "weight_decay": 0.01},
    }
    if not any(settings.get(name) for name in ("steps", "tokens", "minutes")):
        theirs["epochs"] = float(epochs)
    run, stopped_by = train(TrainConfig(**{**theirs, **settings}), out, quiet=quiet)
    if stopped_by is not None:
        raise KeyboardInterrupt
    found, _ = evaluate(run, "test", device=pick_device(run.config.device))
    return {row["metric"]: row["value"] for row in found["rows"] if not row["at"]}, run.model, run.path
