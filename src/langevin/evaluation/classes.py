"""How well texts are classified: accuracy, F1 by class, likelihood, calibration, and the surest mistakes.

    precision_c = right / said c,     recall_c = right / is c,     F1_c = 2 right / (said c + is c)

Macro-F1 is the mean over classes that are there. Numbers have 95 % intervals: shares of texts Wilson's (F1
= 2s / (1 + s), where s of those that are c or were said to be are right), the others by resampling texts.

N texts, C classes.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from langevin.data.reading import classified
from langevin.evaluation import calibration, likelihood
from langevin.evaluation.likelihood import Estimate, wilson
from langevin.evaluation.rows import Row

MISTAKES = 10


def as_windows(logits_NC: Tensor, labels_N: Tensor) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    """A model and windows of two tokens, the second being the class: to be scored as text is."""
    tokens = torch.stack([torch.zeros_like(labels_N), labels_N], 1)
    return lambda inputs: logits_NC[:, None], [(tokens, torch.ones(len(tokens), 1, dtype=torch.bool))]


def fitted_temperature(logits_NC: Tensor, labels_N: Tensor) -> float:
    """By which logits are to be divided to make the labels likeliest, and one mistake more than there are
    (after Laplace): a text with the median lead of the likeliest class over the second, which is taken for
    the truth. Where a model is right about all of N texts, it is then sure of such a text by 1 - 1/N, and
    not of everything."""
    best = logits_NC.topk(2)
    middle = (best.values[:, 0] - best.values[:, 1]).argsort()[len(labels_N) // 2]
    more = torch.cat([logits_NC, logits_NC[None, middle]]), torch.cat([labels_N, best.indices[middle, 1:]])
    return calibration.fit_temperature(*as_windows(*more), device="cpu").value


def confusion(truth_N: NDArray[Any], said_N: NDArray[Any], classes: int) -> NDArray[np.int64]:
    """(C, C): how many of each class (rows) were said to be of each (columns)."""
    return np.bincount(truth_N * classes + said_N, minlength=classes**2).reshape(classes, classes)


def macro_f1(table: NDArray[Any]) -> NDArray[np.float64]:
    """Of (..., C, C): the mean over classes that some text is of or was said to be of."""
    there = table.sum(-2) + table.sum(-1)
    f1 = 2 * np.diagonal(table, 0, -2, -1) / np.maximum(there, 1)
    mean: NDArray[np.float64] = f1.sum(-1) / (there > 0).sum(-1)
    return mean


def measure(
    logits_NC: Tensor, labels_N: Tensor, names: list[str], temperature: float, resamples: int
) -> tuple[list[Row], dict[str, Any]]:
    """Rows of what a model says at its temperature, and what of it also at 1; and details."""
    model, windows = as_windows(logits_NC, labels_N)
    plain, scaled = likelihood.score_at(model, windows, (1.0, temperature), device="cpu")
    found, before = (likelihood.summary(scores, resamples=resamples).nll for scores in (scaled, plain))
    sure, unsure = (
        calibration.measure(scores, resamples=resamples, simulations=resamples)
        for scores in (scaled, plain)
    )
    truth, said = labels_N.numpy(), logits_NC.argmax(-1).numpy()
    table = confusion(truth, said, len(names))
    drawn = np.random.default_rng(0).multinomial(len(truth), table.ravel() / len(truth), resamples)
    again = macro_f1(drawn.reshape(-1, *table.shape))
    macro = Estimate(float(macro_f1(table)), *np.percentile(again, (2.5, 97.5)).tolist())
    rows = [
        Row.of("accuracy", wilson(int(np.trace(table)), len(truth)), "exact", len(truth)),
        Row.of("macro_f1", macro, "exact", len(truth)),
        Row.of("nll", found, "exact", len(truth)),
        Row.of("ece", sure.ece, "diagnostic", len(truth)),
        Row.of("brier", sure.brier, "diagnostic", len(truth)),
        Row.of("plain_nll", before, "exact", len(truth)),
        Row.of("plain_ece", unsure.ece, "diagnostic", len(truth)),
        Row("ece_floor", sure.ece_floor.mean, "diagnostic"),
        Row("temperature", temperature, "diagnostic"),
    ]
    for i, label in enumerate(names):
        right, said_so, true = int(table[i, i]), int(table[:, i].sum()), int(table[i].sum())
        either = wilson(right, said_so + true - right)  # of those that are or were said to be of it
        for name, share in (
            ("precision", wilson(right, said_so)),
            ("recall", wilson(right, true)),
            ("f1", either.map(lambda x: 2 * x / (1 + x))),
        ):
            rows.append(Row.of(name, share, "exact", true, {"class": label}))
    for label, counts in zip(names, table, strict=True):
        for other, count in zip(names, counts, strict=True):
            total, at = int(counts.sum()), {"class": label, "predicted": other}
            rows.append(Row("confusion", float(count / max(1, total)), "diagnostic", at, n=total))
    return rows, {
        "examples": (said == truth).astype(float).tolist(),
        "calibration": asdict(sure),
        "confusion": {"classes": names, "counts": table.tolist()},
    }


def surest_mistakes(
    logits_NC: Tensor, labels_N: Tensor, temperature: float
) -> list[tuple[int, int, float]]:
    """Of the ten mistakes with the highest probability: the text, what was said, and that probability."""
    sure, said = (logits_NC / temperature).softmax(-1).max(-1)
    wrong = (said != labels_N).nonzero()[:, 0]
    worst = wrong[sure[wrong].argsort(dim=0, descending=True, stable=True)[:MISTAKES]]
    return [(int(i), int(said[i]), float(sure[i])) for i in worst]


def classifier(run: Any, device: str, batch: int) -> tuple[Any, list[str]]:
    """A function from texts, or files of images, to the probabilities of classes, and the names of these.
    They are read as those of training were."""
    from langevin.objectives.classify import logits_of, temperature_of

    model = run.model.to(device).eval()

    @torch.no_grad()
    def probabilities(**rows: NDArray[Any]) -> NDArray[Any]:
        read = {name: torch.from_numpy(x).to(device) for name, x in rows.items()}
        logits = logits_of(model, read) / temperature_of(model)
        found: NDArray[Any] = logits.softmax(-1).float().cpu().numpy()
        return found

    make = _of_images if getattr(model.config, "image_size", None) else _of_texts
    names = [model.config.id2label[i] for i in range(model.config.num_labels)]
    return make(run, batch, probabilities), names


def _of_texts(run: Any, batch: int, probabilities: Any) -> Any:
    from langevin.data.examples import around, reading
    from langevin.data.tokenizers import encoder

    context = run.config.context
    tokenizer = reading(run.tokenizer, context)
    encode, edges = encoder(tokenizer), around(tokenizer)

    def classify(texts: list[str]) -> NDArray[Any]:
        ids = [row for row, _ in encode([text.strip() for text in texts], False)]
        return classified(ids, edges, context, tokenizer.pad_token_id, batch, probabilities)

    return classify


def _of_images(run: Any, batch: int, probabilities: Any) -> Any:
    from langevin.data.images import read_image

    size = run.model.config.image_size

    def classify(files: list[str]) -> NDArray[Any]:
        parts = [files[i : i + batch] for i in range(0, len(files), batch)]
        read = (np.stack([read_image(Path(file), size)[0] for file in part]) for part in parts)
        return np.concatenate([probabilities(pixel_values=pixels) for pixels in read])

    return classify
