"""Language modelling: how well is text predicted, and is the confidence true?"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from langevin.errors import UsageError
from langevin.evaluation.rows import Metric, Row
from langevin.settings import TrainConfig
from langevin.tasks.task import Task, objective_of, register, tokenizer_of

MASKS = 8  # of a window, where the likelihood is a bound


@register("lm")
@dataclass(frozen=True)
class LanguageModelling(Task):
    text_column: str | None = None
    """The column of a CSV, TSV or JSONL file that holds the texts; default: text."""
    mask_documents: bool | None = None
    """Whether attention stops at the borders of packed documents; default: where there are documents, and
    the model looks back only."""

    metrics = (
        Metric("nll", "loss", "nats/token", "lower"),
        Metric("perplexity", "perplexity", "", "lower"),
        Metric("bits_per_token", "bits per token", "bits", "lower"),
        Metric("bits_per_character", "bits per character", "bits", "lower"),
        Metric("bits_per_byte", "bits per byte", "bits", "lower"),
        Metric("accuracy", "next-token accuracy", "fraction", "higher"),
        Metric("ece", "calibration error (ECE)", "fraction", "lower"),
        Metric("adaptive_ece", "adaptive ECE, debiased", "fraction", "lower"),
        Metric("scaled_ece", "ECE after temperature scaling", "fraction", "lower"),
        Metric("brier", "Brier score", "", "lower"),
        Metric("top1_brier", "Brier score of the first choice", "", "lower"),
        Metric("entropy", "predictive entropy", "nats", "neither"),
        Metric("temperature", "temperature fitted on validation", "", "neither"),
        Metric("left_to_right_nll", "loss, written left to right", "nats/token", "lower"),
        Metric("left_to_right_bound", "loss in any order of the same windows", "nats/token", "lower"),
        Metric("true_nll", "loss of the true distribution", "nats/token", "neither"),
        Metric("ece_floor", "mean ECE of a calibrated model", "fraction", "neither"),
        Metric("judge_gap", "judge gap to real text", "nats/token", "near zero"),
        Metric("mauve", "MAUVE", "", "higher"),
        Metric("infill_accuracy", "tokens restored in gaps", "fraction", "higher"),
        Metric("corruption_recovery", "wrong tokens repaired", "fraction", "higher"),
        Metric("corruption_spoiled", "right tokens spoiled by it", "fraction", "lower"),
        Metric("judge_nll", "judge loss", "nats/token", "neither"),
        Metric("unigram_entropy", "unigram entropy of a text", "nats", "neither"),
        *(Metric(f"distinct_{n}", f"distinct-{n}", "fraction", "neither") for n in (1, 2, 3, 4)),
        *(Metric(f"repetition_{n}", f"repetition-{n}", "fraction", "neither") for n in (2, 4, 8)),
        Metric("duplicates", "duplicate texts", "fraction", "neither"),
        Metric("memorised_20", "20-grams of the training text", "fraction", "neither"),
        Metric("ms_per_text", "time of a text alone", "ms", "lower"),
        Metric("calls_per_text", "network calls of a text", "", "lower"),
    )
    primary = "nll"
    reported: ClassVar[tuple[str, ...]] = (
        "nll",
        "perplexity",
        "bits_per_character",
        "accuracy",
        "ece",
        "scaled_ece",
        "brier",
    )
    judged: ClassVar[tuple[str, ...]] = (
        "judge_gap",
        "mauve",
        "infill_accuracy",
        "repetition_4",
        "distinct_4",
    )

    def prepare(self, config: TrainConfig, progress: bool = False) -> Any:
        if self.mask_documents and not objective_of(config).causal:
            raise UsageError(
                f"with the objective {config.objective} a document's borders would give its length away",
                "Leave --mask-documents out.",
            )
        if config.train_tokens is not None and config.train_tokens <= config.context + 1:
            raise UsageError(
                f"train_tokens={config.train_tokens} are too few for a context of {config.context}",
                "Use a shorter --context, or more tokens.",
            )
        from langevin import data

        own: dict[str, Any] = {} if self.text_column is None else {"text_column": self.text_column}
        corpus = data.prepare(config.data, tokenizer=tokenizer_of(config), progress=progress, **own)
        for split, least in (("train", config.context + 2), ("valid", config.context + 1)):
            if len(corpus.tokens(split)) < least:
                raise UsageError(
                    f"{config.data} has {len(corpus.tokens(split))} {split} tokens, too few for a context "
                    f"of {config.context}",
                    "Use a shorter --context, or more text.",
                )
        if self.mask_documents and not corpus.has_documents:
            raise UsageError(f"{config.data} has no documents to mask", "Leave --mask-documents out.")
        return corpus

    def an_epoch(self, data: Any, config: TrainConfig) -> int:
        count = len(data.tokens("train"))
        return min(count, config.train_tokens or count)

    def masks(self, config: TrainConfig, corpus: Any) -> bool:
        """Whether documents of this corpus are kept apart. A model that sees both sides would read from
        the borders where a document ends, and have it for nothing."""
        if self.mask_documents is not None:
            return self.mask_documents
        return bool(corpus.has_documents) and objective_of(config).causal

    def model_settings(self, config: TrainConfig, data: Any) -> dict[str, Any]:
        return {
            "vocab_size": data.vocab_size,
            "eos_token_id": data.separator,
            "pad_token_id": data.separator,
        }

    def feed(self, data: Any, config: TrainConfig, device: Any, share: Any) -> Any:
        from langevin.data.feed import TokenFeed

        return TokenFeed(config, data, self.masks(config, data), device, share)

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
        stride: int | None = None,
        resamples: int = 1000,
        attention: bool = True,
        masks: int = MASKS,
        left_to_right: int = 0,
        texts: Any = None,
        told: Callable[[str, int, int | None], None] = lambda what, done, total: None,
    ) -> tuple[list[Row], dict[str, Any]]:
        """Each token is scored once: by documents where these are kept apart, else in windows of the
        training context that start `stride` tokens apart (default: half the context). Intervals come from
        resampling documents or windows. attention: whether to measure the weights. Where the likelihood is
        known by a bound, that is the mean over `masks` masks of each window, and left_to_right says how
        many windows are also scored exactly, token by token. texts: which are to be written and judged
        (`quality.Wanted`), of which told hears."""
        import torch

        from langevin.evaluation.documents import Documents
        from langevin.objectives.ar import Strided

        if run.objective.likelihood is None:
            raise UsageError(
                f"the objective {run.objective.name} has no likelihood",
                "Evaluate a run of another objective.",
            )
        corpus = data or self.prepare(run.config)
        context = run.config.context
        stride = max(1, context // 2) if stride is None else stride
        apart = self.masks(run.config, corpus)

        def windows(name: str) -> Iterable[Any]:
            if apart:
                return Documents(corpus, name, context, stride, batch, limit)
            tokens = torch.from_numpy(corpus.tokens(name)[:limit].astype("int64"))
            return Strided(tokens, context, stride, batch, counts=corpus.scored)

        model = model.to(device).eval()
        details = {"context": context, "stride": stride, "by documents": apart}
        judged: list[Row] = []
        if texts is not None:
            from langevin.evaluation import quality

            judging: dict[str, Any] = {"device": device, "resamples": resamples, "told": told}
            judged, details["quality"] = quality.measure(run, corpus, split, texts, **judging)
            told("scoring", 0, None)
        # In a stream the first token is context; the first of a document follows its separator.
        characters, utf8_bytes = corpus.text_size(split, 0 if apart else 1, limit)
        sizes = {"characters": characters, "utf8_bytes": utf8_bytes, "resamples": resamples}
        if run.objective.likelihood == "exact":
            rows, more = _exact(model, windows, split, device, sizes)
            more["attention"] = _attention(model, windows(split)) if attention else []
        else:
            options = {"masks": masks, "left_to_right": left_to_right, "batch": batch}
            rows, more = _bound(run.objective, model, windows(split), device, sizes, **options)
        true = corpus.true_nats_per_token(split)
        rows += [] if true is None else [Row("true_nll", true, "exact")]
        return [*rows, *judged], {**details, **more}

    def not_measured(self, objective: Any) -> tuple[str, ...]:
        """What only `evaluate --left-to-right` gives, and, where the likelihood is a bound, what is about
        predictions of single tokens."""
        asked_for = ("left_to_right_nll", "left_to_right_bound")
        if objective.likelihood != "bound":
            return asked_for
        return (*asked_for, "accuracy", "entropy", *_CALIBRATION, "scaled_ece", "temperature", "ece_floor")


def _exact(
    model: Any, windows: Callable[[str], Iterable[Any]], split: str, device: str, sizes: dict[str, Any]
) -> tuple[list[Row], dict[str, Any]]:
    """Likelihood and calibration of a model that predicts token by token."""
    from langevin.evaluation import calibration, likelihood

    resamples = sizes["resamples"]
    fit = calibration.fit_temperature(model, windows("valid"), device=device)
    plain, scaled = likelihood.score_at(model, windows(split), (1.0, fit.value), device=device)
    found = likelihood.summary(plain, **sizes)
    calibrated, rescaled = (
        calibration.measure(scores, resamples=resamples, simulations=resamples)
        for scores in (plain, scaled)
    )
    estimates: list[tuple[str, Any, Any]] = [
        *((name, getattr(found, name), "exact") for name in _LIKELIHOOD),
        *((name, getattr(calibrated, name), "diagnostic") for name in _CALIBRATION),
        ("scaled_ece", rescaled.ece, "diagnostic"),
    ]
    rows = [Row.of(name, e, kind, len(plain)) for name, e, kind in estimates if e is not None]
    rows.append(Row("temperature", fit.value, "diagnostic"))
    rows.append(Row("ece_floor", calibrated.ece_floor.mean, "diagnostic"))
    return rows, {
        "tokens": len(plain),
        "likelihood": asdict(found),
        "calibration": asdict(calibrated),
        "temperature": {"fitted on validation": fit.value, "inside the range searched": fit.inside},
        "calibration at that temperature": asdict(rescaled),
    }


def _bound(
    objective: Any,
    model: Any,
    windows: Iterable[Any],
    device: str,
    sizes: dict[str, Any],
    masks: int,
    left_to_right: int,
    batch: int,
) -> tuple[list[Row], dict[str, Any]]:
    """An upper bound of the loss, and on so many windows the loss of writing from left to right.
    Predictions of single tokens have no calibration here: what they are made from depends on the mask."""
    from langevin.evaluation import bounds
    from langevin.evaluation.likelihood import TokenBounds, summary

    found = bounds.bounded(objective, model, windows, masks=masks, device=device)
    whole = summary(found, **sizes)
    estimates = [(name, getattr(whole, name)) for name in _LIKELIHOOD]
    rows = [Row.of(name, e, "bound", len(found)) for name, e in estimates if e is not None]
    masked = {"a window": masks, "standard error by them alone": found.masks_se}
    more: dict[str, Any] = {"tokens": len(found), "likelihood": asdict(whole), "masks": masked}
    if left_to_right:
        written = bounds.left_to_right(
            objective, model, windows, rows=left_to_right, at_once=batch, device=device
        )
        exact = summary(written, resamples=sizes["resamples"]).nll
        rows.append(Row.of("left_to_right_nll", exact, "exact", len(written)))
        same = TokenBounds(found.nll[: len(written)], found.unit[: len(written)])
        bound = summary(same, resamples=sizes["resamples"]).nll
        rows.append(Row.of("left_to_right_bound", bound, "bound", len(written)))
        more["left to right"] = {"tokens": len(written), **asdict(exact)}
    return rows, more


_LIKELIHOOD = (
    *("nll", "perplexity", "bits_per_token", "bits_per_character", "bits_per_byte", "accuracy"),
    "entropy",
)
_CALIBRATION = ("ece", "adaptive_ece", "brier", "top1_brier")


def _attention(model: Any, windows: Any) -> list[dict[str, Any]]:
    """Statistics of the weights that the model really uses, on the first batch of windows."""
    import torch

    from langevin.evaluation.attention import attention_statistics
    from langevin.kernels.view import View

    tokens = next(iter(windows))[0]
    inputs = tokens[:8, :-1].to(model.device)
    try:
        with torch.no_grad():
            weights = model(inputs, output_attentions=True, use_cache=False).attentions
    except UsageError:  # an attention-free layer has no weights
        return []
    visible = View.of(inputs.shape[1], inputs.shape[1], causal=True).mask()
    return [
        {"layer": layer, **asdict(head)}
        for layer, w in enumerate(weights)
        for head in attention_statistics(w.float().cpu(), visible)
    ]
