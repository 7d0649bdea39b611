"""How well a model predicts text whose likelihood is known by an upper bound alone.

    bounds = bounded(objective, model, windows, masks=8, device="cpu")
    summary(bounds, characters=len(text)).nll

Every row is masked `masks` times, with amounts that are stratified over them. The masks are a function of
the row's place in the text and a fixed seed: models scored on the same windows meet the same ones.

B rows, L predictions, K masks, N scored tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from langevin.errors import Diverged, UsageError
from langevin.evaluation.likelihood import TokenBounds
from langevin.objectives import Batch, Objective, ar, generator_of


def _batch(tokens: Tensor, scored: Tensor, device: torch.device | str) -> Batch:
    """A batch as objectives take it, in which the first token is never scored."""
    whole = torch.cat([torch.zeros_like(scored[:, :1]), scored], 1)
    return {"tokens": tokens.to(device), "scored": whole.to(device)}


@torch.no_grad()
def bounded(
    objective: Objective,
    model: Any,
    windows: Iterable[ar.Windows],
    *,
    masks: int,
    device: torch.device | str,
    seed: int = 0,
) -> TokenBounds:
    """The bound of every token that the windows mark, the mean over so many masks."""
    if masks < 1:
        raise UsageError(f"masks={masks} must be 1 or more")
    parts, units, seen, square = [], [], 0, 0.0
    for tokens, scored, *named in windows:
        batch = _batch(tokens, scored, device)
        rows = [objective.draws(batch, masks, generator_of(seed, seen + i)) for i in range(len(tokens))]
        drawn = {name: torch.stack([row[name] for row in rows], 1).to(device) for name in rows[0]}
        found_KBL = torch.stack(
            [
                objective.upper_bound(model, {**batch, **{name: x[k] for name, x in drawn.items()}}).cpu()
                for k in range(masks)
            ]
        ).double()
        if not bool(found_KBL.isfinite().all()):
            raise Diverged(
                f"the bound of windows {seen} to {seen + len(tokens) - 1} is not finite",
                "The model has diverged or overflows: try an earlier checkpoint, or float32.",
            )
        if masks > 1:
            square += float(found_KBL.sum(-1).var(0).sum()) / masks
        unit = torch.arange(seen, seen + len(tokens))[:, None].expand(scored.shape)
        parts.append(found_KBL.mean(0)[scored.cpu()].numpy())
        units.append((named[0] if named else unit).cpu()[scored.cpu()].numpy())
        seen += len(tokens)
    if not sum(map(len, parts)):
        raise UsageError("no token is scored", "The text is empty, or the windows mark nothing.")
    nll = np.concatenate(parts)
    by_masks = math.sqrt(square) / len(nll) if masks > 1 else None
    return TokenBounds(nll, np.concatenate(units).astype(np.int64), by_masks)


@torch.no_grad()
def left_to_right(
    objective: Objective,
    model: Any,
    windows: Iterable[ar.Windows],
    *,
    rows: int,
    at_once: int,
    device: torch.device | str,
) -> TokenBounds:
    """The exact loss of the first rows of the windows when the model writes them token by token: a bound
    that is an equality, without masks."""
    parts, units, seen = [], [], 0
    for tokens, scored, *_ in windows:
        tokens, scored = tokens[: rows - seen], scored[: rows - seen].cpu()
        if not len(tokens):
            break
        found_BL = objective.chain_rule(model, _batch(tokens, scored, device), at_once).double().cpu()
        parts.append(found_BL[scored].numpy())
        units.append((torch.arange(seen, seen + len(tokens))[:, None].expand(scored.shape))[scored].numpy())
        seen += len(tokens)
    return TokenBounds(np.concatenate(parts), np.concatenate(units))
