"""Length generalisation: trained at one context, how well is longer text predicted?"""

from dataclasses import dataclass
from typing import Any

from langevin.errors import UsageError
from langevin.evaluation.rows import Metric, Row
from langevin.settings import TrainConfig, read_numbers
from langevin.tasks.lm import LanguageModelling
from langevin.tasks.task import objective_of, register

FIRST = 16  # tokens of the first bin of positions; each further one ends at twice the place


@register("lengths")
@dataclass(frozen=True)
class Lengths(LanguageModelling):
    lengths: str = ""
    """Tokens that are read at a time, such as 256,1024,4096; default: 1, 2, 4, 8 and 16 contexts, with
    learned positions 1."""
    at: int | None = None
    """The length that verdicts are about; default: the longest."""

    metrics = (
        Metric("nll", "loss", "nats/token", "lower"),
        Metric("rise", "relative change of the loss", "", "lower", signed=True),
    )
    reported = ("nll", "rise")
    judged = ()

    def tried(self, config: TrainConfig) -> list[int]:
        at = None if self.at == config.context else self.at
        return sorted({config.context, *contexts(self.lengths, config, (1, 2, 4, 8, 16), at)})

    def prepare(self, config: TrainConfig, progress: bool = False) -> Any:
        if objective_of(config).likelihood != "exact":
            raise UsageError(
                f"the objective {config.objective} gives no token a loss of its own",
                "Use the objective ar.",
            )
        if self.mask_documents:
            raise UsageError(
                "a text longer than its documents has nothing to gain where they are kept apart",
                "Leave --mask-documents out.",
            )
        longest = self.tried(config)[-1]
        corpus = super().prepare(config, progress)
        windows_of("test", corpus.tokens("test"), longest)
        return corpus

    def masks(self, config: TrainConfig, corpus: Any) -> bool:
        return False

    def measure(  # type: ignore[override]
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
        """The same tokens at every length: a split in windows of n tokens without overlap, each token of
        which sees what stands before it in its window. By position: of windows of the longest length.
        Intervals come from resampling these."""
        import numpy as np
        import torch

        from langevin.evaluation.likelihood import bootstrap, per_unit, score
        from langevin.evaluation.retrieval import refuse_beyond_positions
        from langevin.objectives.ar import Strided

        lengths, context = self.tried(run.config), run.config.context
        tokens = (data or self.prepare(run.config)).tokens(split)[:limit]
        longest = lengths[-1]
        windows = windows_of(split, tokens, longest)
        refuse_beyond_positions(model, longest)  # of a pretrained model
        text = torch.from_numpy(tokens[: windows * longest + 1].astype("int64"))
        model = model.to(device).eval()
        losses = {
            n: score(model, Strided(text, n, batch=max(1, batch * context // n)), device=device).nll
            for n in lengths
        }

        def row(metric: str, n: int, at: dict[str, Any], places: slice = slice(None)) -> Row:
            loss, base = (losses[m].reshape(windows, longest)[:, places] for m in (n, context))
            base = np.ones(loss.shape) if metric == "nll" else base
            sums = per_unit(np.stack([base.ravel(), loss.ravel()]), np.arange(loss.size) // loss.shape[1])
            (found,) = bootstrap(
                sums,
                lambda s: s[..., 1:] / s[..., :1] - (metric == "rise"),
                resamples=resamples,
                seed=0,
            )
            return Row.of(metric, found, "exact", loss.size, at)

        at = self.at or longest
        rows = [row(metric, at, {}) for metric in ("nll", "rise")]
        rows += [row(metric, n, {"length": n}) for metric in ("nll", "rise") for n in lengths]
        first = 0
        while first < longest:
            last = min(longest, 2 * first or FIRST)
            rows.append(row("nll", longest, {"position": last}, slice(first, last)))
            first = last
        return rows, {"context": context, "at": at, "windows": windows, "tokens": len(text) - 1}


def windows_of(split: str, tokens: Any, longest: int) -> int:
    windows = (len(tokens) - 1) // longest
    if windows < 1:
        raise UsageError(
            f"{split} has {len(tokens)} tokens, too few for a length of {longest}",
            "Use shorter --lengths, or more text.",
        )
    return windows


def contexts(text: str, config: TrainConfig, times: tuple[int, ...], at: int | None) -> list[int]:
    """The lengths that are named, or so many contexts. Raises where learned positions do not reach."""
    learned = config.init is None and config.positions == "learned"
    lengths = read_lengths(text, [config.context * n for n in ((1,) if learned else times)], at)
    if learned and lengths[-1] > config.context:
        raise UsageError(
            f"a length of {lengths[-1]} is beyond the {config.context} learned positions of the model",
            "Give no longer --lengths, or train with rope, alibi, sinusoidal or no positions.",
        )
    return lengths


def read_lengths(text: str, usual: list[int], at: int | None) -> list[int]:
    """Raises where the one that verdicts are about is not among them."""
    lengths = sorted({*(read_numbers(text, "lengths", int) or usual)})
    if lengths[0] < 2:
        raise UsageError(f"a length of {lengths[0]} is too short", "The least is 2.")
    if at is not None and at not in lengths:
        raise UsageError(f"at={at} is no length that is tried", f"Choose one of {lengths}.")
    return lengths
