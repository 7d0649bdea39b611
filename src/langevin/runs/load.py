"""Read a run folder: strictly, so that nothing is taken for the run's model that is not."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langevin.errors import UsageError, WorkError
from langevin.runs import files
from langevin.runs.folder import ENVIRONMENT, read_metrics, sessions

if TYPE_CHECKING:
    from langevin.settings import TrainConfig

AGAIN = "Bring the folder back from a copy, or train again."


@dataclass(frozen=True)
class Run:
    """A finished or interrupted run; its folder need not be writable."""

    path: Path
    config: TrainConfig
    checkpoint: Path | None = None
    """Whose weights the model has; None: those of model/, the best by validation loss."""

    @property
    def model(self) -> Any:
        """A transformers model in evaluation mode."""
        return self._loaded[0]

    @property
    def model_sha256(self) -> str:
        """The hash of the file that the weights of `model` came from."""
        return self._loaded[1]

    @cached_property
    def _loaded(self) -> tuple[Any, str]:
        """Of one version of the folder, also where training replaces it meanwhile."""
        for _ in range(20):
            folder = files.standing(self.path / "model")
            before = _identity(folder)
            try:
                model = read_model(folder, self.config)
                digest = files.sha256(*weight_files(folder))
            except Exception:
                if _identity(files.standing(self.path / "model")) == before:
                    raise
                continue
            if _identity(files.standing(self.path / "model")) == before:
                break
        else:
            raise WorkError(f"{self.path / 'model'} is replaced faster than it can be read", "Try again.")
        if self.checkpoint is not None:
            digest = put_weights(self.checkpoint, model)
        return model, digest

    @cached_property
    def tokenizer(self) -> Any:
        return read_tokenizer(files.standing(self.path / "model"))

    @cached_property
    def objective(self) -> Any:
        from langevin.objectives import OBJECTIVES

        return OBJECTIVES.parse(self.config.objective)

    @cached_property
    def task(self) -> Any:
        from langevin.tasks import TASKS

        return TASKS.parse(self.config.task)

    @cached_property
    def sessions(self) -> list[dict[str, Any]]:
        """Where, when and on what data it was trained, the first session first."""
        found = sessions(self.path)
        if not found:
            where = self.path / ENVIRONMENT
            raise UsageError(f"{where} does not say what it was trained on", "Bring it back from a copy.")
        return found

    @property
    def environment(self) -> dict[str, Any]:
        """The last session: versions, device, commit, the data's hashes."""
        return self.sessions[-1]

    def metrics(self, split: str | None = None) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, of one split or all."""
        rows = read_metrics(self.path / "metrics.jsonl")
        return [row for row in rows if split in (None, row["split"])]

    @property
    def step(self) -> int | None:
        """After which step the model was kept."""
        if self.checkpoint is not None:
            return int(self.checkpoint.name.removeprefix("step-"))
        best = [row["step"] for row in self.metrics("valid") if row.get("best")]
        return best[-1] if best else None

    def keep_evaluation(self, split: str, values: dict[str, Any]) -> tuple[dict[str, Any], Path | None]:
        """Write down what was measured of `model`, with its step and hash; what was written, and where
        (None: the folder cannot be written to)."""
        whole = {"step": self.step, "model_sha256": self.model_sha256, "split": split, **values}
        try:
            files.write_json(self._evaluation_file(split), whole)
        except WorkError:
            return whole, None
        return whole, self._evaluation_file(split)

    def evaluation(self, split: str, shape: dict[str, Any] | None = None) -> dict[str, Any]:
        """What was measured of the model that is there now on a split, of a shape as in `files.misfit`."""
        remedy = f"Run: langevin evaluate {self.path} --split {split}"
        path = self._evaluation_file(split)
        if not path.exists():
            raise UsageError(f"{self.path} was not evaluated on {split}", remedy)
        known = {"split": split, "step": (int, None)}
        read: dict[str, Any] = files.read_json(path, {**known, **(shape or {})}, remedy)
        weights = weight_files(files.standing(self.path / "model"), self.checkpoint)
        same = read["step"] == self.step  # version 0.1 kept no hash
        if not (read["model_sha256"] == files.sha256(*weights) if "model_sha256" in read else same):
            raise UsageError(f"{self.path} was trained on since it was evaluated on {split}", remedy)
        return read

    def keep_sample(self, text: dict[str, Any]) -> None:
        """Add a text to samples/; where the folder cannot be written to, a warning says so."""
        try:
            files.append_json(self.path / "samples" / "samples.jsonl", text)
        except WorkError as error:
            warnings.warn(error.cause, stacklevel=2)

    def _evaluation_file(self, split: str) -> Path:
        of = "" if self.checkpoint is None else f"-{self.checkpoint.name}"
        return self.path / f"evaluation-{split}{of}.json"


def load(path: str | os.PathLike[str], checkpoint: str = "best", data: str | None = None) -> Run:
    """Open a run folder.

    checkpoint: "best" by validation loss, "last", or the number of a step that was kept. data: where the
    data are now, if they were moved.
    """
    from langevin.settings import TrainConfig

    folder = Path(path)
    if not (folder / "config.yaml").is_file():
        raise UsageError(f"{folder} is not a run folder", "Give a folder made by langevin train.")
    config = TrainConfig.read(folder / "config.yaml")
    if not files.standing(folder / "model").is_dir():
        raise UsageError(
            f"{folder} holds no model yet", "Let it train until its first evaluation (--resume auto)."
        )
    config = config if data is None else replace(config, data=data)
    return Run(folder, config, None if checkpoint == "best" else _checkpoint(folder, checkpoint))


def _checkpoint(folder: Path, which: str) -> Path:
    from langevin.training import checkpoint

    every = checkpoint.found(folder / "checkpoints")
    names = [path.name.removeprefix("step-") for path in every]
    if which == "last" and names:
        which = names[-1]
    if which not in names:
        raise UsageError(
            f"{folder} has no checkpoint {which!r}",
            f"Use best{', last' * bool(names)}{''.join(f' or {name}' for name in names[-6:])}.",
        )
    path = every[names.index(which)]
    problem = checkpoint.damage(path)
    if problem is not None:
        raise WorkError(f"{path} is damaged: {problem}", "Use --checkpoint best.")
    return path


def weight_files(folder: Path, checkpoint: Path | None = None) -> list[Path]:
    """The safetensors files of a saved model, or the one of a checkpoint that is evaluated."""
    if checkpoint is not None:
        average = checkpoint / "average.safetensors"
        return [average if average.exists() else checkpoint / "weights.safetensors"]
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file() or not index.is_file():
        return [whole]
    shards: dict[str, str] = files.read_json(index, {"weight_map": {str: str}}, AGAIN)["weight_map"]
    return [folder / Path(name).name for name in sorted(set(shards.values()))]


def read_model(folder: Path, config: TrainConfig) -> Any:
    """The model of a run as it was saved: of exactly the settings of the run, with every weight in its
    place and finite. Nothing but safetensors is read, and no code but ours and transformers' is run."""
    import torch

    from langevin.models.convert import from_pretrained

    described = files.read_json(folder / "config.json", {"model_type": str}, AGAIN)
    if config.init is None:
        _refuse_other_settings(folder, described, config)
    model = from_pretrained(folder, dtype=torch.float32)
    _refuse_not_finite(folder, dict(model.named_parameters()))
    return model.eval()


def _refuse_other_settings(folder: Path, described: dict[str, Any], config: TrainConfig) -> None:
    """What config.json says of the model, and means by what it leaves out, must be what the run was
    trained with: before a model is built, which could be a huge one."""
    from safetensors import SafetensorError, safe_open

    from langevin.models.config import LangevinConfig
    from langevin.objectives import OBJECTIVES
    from langevin.training.start import head_of, model_config

    said = {**LangevinConfig().to_dict(), **described}
    rows = said["vocab_size"]
    with suppress(OSError, SafetensorError), safe_open(weight_files(folder)[0], "pt") as stored:
        rows = stored.get_slice("model.embed.weight").get_shape()[0]
    objective = OBJECTIVES.parse(config.objective)
    trained = model_config(config, vocab_size=rows - objective.extra_tokens).to_dict()
    trained["architectures"] = [head_of(config)]
    for key in SETTINGS:
        if said[key] != trained[key]:
            raise WorkError(
                f"{folder / 'config.json'} says {key}={said[key]!r:.60}, not {trained[key]!r:.60}", AGAIN
            )


SETTINGS = (
    *("model_type", "architectures", "vocab_size", "hidden_size", "num_hidden_layers", "mixer", "norm"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "mlp", "intermediate_size"),
    *("positions", "qk_norm", "tie_word_embeddings", "causal", "candidates", "pooling"),
    *("image_size", "patch_size", "stem"),
)


def put_weights(checkpoint: Path, model: Any) -> str:
    """Put the weights that a checkpoint would be evaluated with into a model; the hash of their file."""
    from langevin.training.checkpoint import read, weights

    (file,) = weight_files(checkpoint, checkpoint)
    tensors = weights(model) if file.stem == "weights" else dict(model.named_parameters())
    read(checkpoint, {file.stem: tensors})
    _refuse_not_finite(file, tensors)
    return files.sha256(file)


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer that was saved with a model: it knows no token that the model does not."""
    from langevin.data.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(folder)
    largest = max(tokenizer.get_vocab().values())
    tokens = files.read_json(folder / "config.json", {"vocab_size": int}, AGAIN)["vocab_size"]
    if largest >= tokens:
        raise WorkError(
            f"{folder} has a tokenizer with token {largest} and a model of {tokens} tokens", AGAIN
        )
    return tokenizer


def _refuse_not_finite(where: Path, tensors: dict[str, Any]) -> None:
    for name, x in tensors.items():
        if not x.isfinite().all():
            raise WorkError(f"{where} is damaged: {name} is not finite", AGAIN)


def _identity(folder: Path) -> Any:
    """Changes whenever a folder is replaced."""
    try:
        return folder.stat().st_ino, folder.stat().st_mtime_ns
    except OSError:
        return None
