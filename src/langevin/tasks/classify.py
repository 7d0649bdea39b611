"""Text classification: is the class right, and the confidence true?"""

from dataclasses import dataclass
from typing import Any

from langevin.errors import UsageError
from langevin.evaluation.rows import Metric, Row
from langevin.settings import TrainConfig
from langevin.tasks.task import Task, objective_of, register, tokenizer_of


class Labelled(Task):
    """Examples, texts or others, with classes."""

    metrics = (
        Metric("accuracy", "accuracy", "fraction", "higher"),
        Metric("macro_f1", "macro-F1", "fraction", "higher"),
        Metric("nll", "loss", "nats/example", "lower"),
        Metric("ece", "calibration error (ECE)", "fraction", "lower"),
        Metric("brier", "Brier score", "", "lower"),
        Metric("plain_nll", "loss before temperature scaling", "nats/example", "lower"),
        Metric("plain_ece", "ECE before temperature scaling", "fraction", "lower"),
        Metric("ece_floor", "mean ECE of a calibrated model", "fraction", "neither"),
        Metric("temperature", "temperature fitted on validation", "", "neither"),
        Metric("precision", "precision", "fraction", "neither"),
        Metric("recall", "recall", "fraction", "neither"),
        Metric("f1", "F1", "fraction", "neither"),
        Metric("confusion", "share of the class", "fraction", "neither"),
    )
    primary = "accuracy"
    reported = ("accuracy", "macro_f1", "nll", "ece", "brier", "plain_ece")
    unit = "examples"
    objective = "classify"
    epochs = 10.0
    used_by = "predict"
    shows_training = True

    def check(self, config: TrainConfig) -> None:
        if objective_of(config).name != self.objective:
            raise UsageError(
                f"the objective {config.objective} predicts no classes", "Leave --objective out."
            )

    def tokens_a_step(self, config: TrainConfig) -> int:
        return config.batch

    def an_epoch(self, data: Any, config: TrainConfig) -> int:
        return len(data.train)

    def held_out(self, data: Any, config: TrainConfig) -> list[dict[str, Any]]:
        rows = some_rows(data, "valid", config.eval_tokens)
        return [data.rows("valid", some) for some in data.in_batches("valid", rows, config.batch)]

    def measure(
        self,
        run: Any,
        model: Any,
        split: str,
        *,
        device: str = "cpu",
        batch: int = 16,
        limit: int | None = None,
        data: Any = None,
        resamples: int = 1000,
    ) -> tuple[list[Row], dict[str, Any]]:
        """Of all rows of a split, or of so many drawn ones, at the model's own temperature."""
        import numpy as np
        import torch

        from langevin.evaluation import classes
        from langevin.objectives.classify import logits_of, temperature_of

        texts = data or self.prepare(run.config)
        rows, temperature = some_rows(texts, split, limit), temperature_of(model)
        model = model.to(device).eval()
        found, order = [], []
        with torch.no_grad():
            for some in texts.in_batches(split, rows, batch):
                arrays = texts.rows(split, some)
                found.append(
                    logits_of(model, {k: torch.from_numpy(v).to(device) for k, v in arrays.items()})
                )
                order.append(some)
        logits = torch.cat(found).cpu()[np.argsort(np.concatenate(order))]
        labels = torch.from_numpy(texts.labels(split)[rows])
        measured, details = classes.measure(logits, labels, texts.classes, temperature, resamples)
        originals = texts.texts(split)
        mistakes = [
            {
                "text": originals[rows[i]],
                "class": texts.classes[int(labels[i])],
                "predicted": texts.classes[said],
                "probability": sure,
            }
            for i, said, sure in classes.surest_mistakes(logits, labels, temperature)
        ]
        return measured, {"context": run.config.context, "mistakes": mistakes, **details}


@register("classify")
@dataclass(frozen=True)
class Classify(Labelled):
    text_column: str | None = None
    """The column of a table that holds the texts; default: text."""
    label_column: str | None = None
    """The column of a table that holds the classes; default: label."""

    def prepare(self, config: TrainConfig, progress: bool = False) -> Any:
        self.check(config)
        from langevin import data

        return data.prepare_labelled(
            config.data,
            tokenizer_of(config),
            context=config.context,
            text_column=self.text_column,
            label_column=self.label_column,
            first=config.train_tokens,
            progress=progress,
        )

    def model_settings(self, config: TrainConfig, data: Any) -> dict[str, Any]:
        return {
            "vocab_size": data.vocab_size,
            "pad_token_id": data.tokenizer.pad_token_id,
            **names_of(data.classes),
        }

    def batch(self, data: Any, config: TrainConfig, step: int) -> dict[str, Any]:
        return dict(data.batch(step, seed=config.seed, batch=config.batch))

    def feed(self, data: Any, config: TrainConfig, device: Any, share: Any) -> Any:
        from langevin.data.feed import Feed

        widest = data.widest(config.seed, config.batch)
        held_out = self.held_out(data, config)
        return Feed(lambda step: self.batch(data, config, step), held_out, device, share, widest)


def names_of(classes: list[str]) -> dict[str, Any]:
    """Of a model's config."""
    return {"id2label": dict(enumerate(classes)), "label2id": {name: i for i, name in enumerate(classes)}}


def some_rows(data: Any, split: str, limit: int | None) -> Any:
    """All rows of a split, or so many drawn ones, as they stand: files are often sorted by class."""
    import numpy as np

    from langevin.data import order

    count = len(data.labels(split))
    if limit is None or limit >= count:
        return np.arange(count)
    return np.sort(order.permutation(count, 0)[:limit])
