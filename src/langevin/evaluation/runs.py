"""Evaluate a run folder: a pass over validation to fit a temperature, one over the split for the rest."""

from __future__ import annotations

import json
from typing import Any

import torch

from langevin.data import Corpus, prepare
from langevin.errors import UsageError
from langevin.evaluation import calibration, likelihood
from langevin.evaluation.attention import attention_statistics, learned_scalars
from langevin.kernels.view import View
from langevin.objectives.ar import Strided
from langevin.runs import Run


def evaluate(run: Run, split: str = "test", **options: Any) -> dict[str, Any]:
    """Likelihood, calibration, attention and learned scalars of a run's best model; kept in its folder.

    The options are those of `evaluate_model`.
    """
    rows = [row for row in run.metrics("valid") if row.get("best")]
    result = evaluate_model(run, run.model, split, **options)
    result["step"] = rows[-1]["step"] if rows else None  # of the best model
    (run.path / f"evaluation-{split}.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def evaluate_model(
    run: Run,
    model: Any,
    split: str = "test",
    *,
    stride: int | None = None,
    device: str = "cpu",
    batch: int = 16,
    resamples: int = 1000,
    limit: int | None = None,
    attention: bool = True,
) -> dict[str, Any]:
    """The same of any model of a run.

    Each token is scored once, in windows of the training context that start `stride` tokens apart (default:
    half the context). Intervals come from resampling windows, and noise floors from as many simulations.
    limit: look at the first so many tokens of each split only; attention: whether to measure the weights.
    """
    if split not in ("valid", "test"):
        raise UsageError(f"split={split!r} must be 'valid' or 'test'", "Training data are for training.")
    corpus = prepare(run.config.data, tokenizer=run.config.tokenizer, progress=False)
    _same_data(run, corpus)
    model = model.to(device)
    context = run.config.context
    stride = stride or max(1, context // 2)

    def windows(name: str) -> Strided:
        tokens = torch.from_numpy(corpus.tokens(name)[:limit].astype("int64"))
        return Strided(tokens, context, stride, batch)

    fit = calibration.fit_temperature(model, windows("valid"), device=device)
    plain, scaled = likelihood.score_at(model, windows(split), (1.0, fit.value), device=device)
    characters, utf8_bytes = _scored_text(corpus, split, limit)
    return {
        "split": split,
        "tokens": len(plain),
        "true_nats_per_token": corpus.true_nats_per_token(split),
        "context": context,
        "stride": stride,
        "likelihood": likelihood.summary(
            plain, characters=characters, utf8_bytes=utf8_bytes, resamples=resamples
        ).as_dict(),
        "calibration": calibration.measure(plain, resamples=resamples, simulations=resamples).as_dict(),
        "temperature": {"fitted on validation": fit.value, "inside the range searched": fit.inside},
        "calibration at that temperature": calibration.measure(
            scaled, resamples=resamples, simulations=resamples
        ).as_dict(),
        "attention": _attention(model, windows(split)) if attention else [],
        "learned": [row.as_dict() for row in learned_scalars(model)],
    }


def _scored_text(corpus: Corpus, split: str, limit: int | None) -> tuple[int, int]:
    """Characters and bytes of the text that is predicted: all but the first token, the ends not counted."""
    tokens = corpus.tokens(split)
    first = corpus.tokenizer.decode(tokens[:1].tolist(), skip_special_tokens=True)
    if limit is None or limit >= len(tokens):
        size = corpus.manifest["splits"][split]
        return size["characters"] - len(first), size["bytes"] - len(first.encode())
    text = corpus.tokenizer.decode(tokens[:limit].tolist(), skip_special_tokens=True)
    return len(text) - len(first), len(text.encode()) - len(first.encode())


def _same_data(run: Run, corpus: Corpus) -> None:
    """A run may only be judged on the data it was trained with."""
    trained = run.environment["data"]
    if trained["tokenizer"] != corpus.manifest["tokenizer"]:
        raise UsageError(
            f"the tokenizer of {run.config.data} is not the one {run.path} was trained with",
            "Bring the same tokenizer back, or train again.",
        )
    for split, facts in trained["splits"].items():
        if facts["text_sha256"] != corpus.manifest["splits"][split]["text_sha256"]:
            raise UsageError(
                f"the {split} text of {run.config.data} is not the one {run.path} was trained with",
                "Bring the same text back, or train again.",
            )


@torch.no_grad()
def _attention(model: Any, windows: Strided) -> list[dict[str, Any]]:
    """Statistics of the weights that the model really uses, on the first batch of windows."""
    tokens = next(iter(windows))[0]
    inputs = tokens[:8, :-1].to(model.device)
    try:
        weights = model(inputs, output_attentions=True, use_cache=False).attentions
    except UsageError:  # an attention-free layer has no weights
        return []
    visible = View.of(inputs.shape[1], inputs.shape[1], causal=True).mask()[:, 0]
    return [
        {"layer": layer, **head.as_dict()}
        for layer, w in enumerate(weights)
        for head in attention_statistics(w.float().cpu(), visible)
    ]
