"""Texts from a masked-diffusion model: how one asks for them, and how a batch after another is written.

`langevin.sampling.denoising` writes a batch, `langevin.sampling.orders` has the orders in which.
Ancestral steps, first-hitting and a window of one position, which is from left to right, (with a call for
each token, at temperature 1) sample from the model; the other orders look for its modes. B texts in a
batch, L positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from langevin.errors import UsageError
from langevin.sampling.ar import refuse_too_long
from langevin.sampling.canvas import GAP, Canvas, begun, ended
from langevin.sampling.denoising import Denoising
from langevin.sampling.orders import Order, Remask
from langevin.sampling.text import Request, Sampling, Step, Text


@dataclass(frozen=True)
class MaskedSampling(Sampling):
    """How a text comes out of masks."""

    least_tokens: ClassVar[int] = 0

    tokens: int = 0
    """Tokens to write; 0: as many as fill the context, or 16 for each gap of --infill."""
    temperature: float = 1.0
    """0: always the likeliest token; 1: as the model says."""
    steps: int = 0
    """Steps to write them in, of a network call each; 0: as many as tokens."""
    order: Order = "confidence"
    """Which positions are committed first."""
    window: int = 0
    """Commit among the first so many open positions alone, 1: from left to right; 0: anywhere."""
    threshold: float = 0.9
    """What --order threshold is sure of."""
    remask: Remask = "none"
    """Open committed positions again, in ancestral steps."""
    eta: float = 0.02
    """How much --remask opens, from 0 to 1."""
    sweeps: int = 0
    """When all is written, draw every token again so many times, given the others: 8 calls a time."""
    fixed: bool = False
    """Write all tokens, and go on after the end of a text."""
    infill: tuple[str, ...] = ()
    """Texts with gaps to fill, such as "Once ___ the end", in place of --prompt."""

    def check(self) -> None:
        super().check()
        for name, none in (("steps", "as many as tokens"), ("window", "anywhere"), ("sweeps", "none")):
            if getattr(self, name) < 0:
                raise UsageError(f"{name}={getattr(self, name)} must be 0 ({none}) or more")
        if self.steps and self.order == "threshold":
            raise UsageError("--order threshold takes the steps that it needs", "Leave --steps out.")
        if self.window and self.order == "ancestral":
            raise UsageError("ancestral steps commit anywhere", "Leave --window out, or choose an --order.")
        if not 0 <= self.threshold < 1:
            raise UsageError(f"threshold={self.threshold} must be from 0 to below 1")
        if self.remask != "none" and self.order != "ancestral":
            raise UsageError("--remask goes with ancestral steps", "Give --order ancestral.")
        if not 0 <= self.eta <= 1:
            raise UsageError(f"eta={self.eta} must be from 0 to 1")
        for name, used in (("--threshold", self.order == "threshold"), ("--eta", self.remask != "none")):
            if not used and getattr(self, name[2:]) != getattr(MaskedSampling, name[2:]):
                need = "--order threshold" if name == "--threshold" else "--remask"
                raise UsageError(f"{name} changes nothing without {need}", f"Leave {name} out.")
        for text in self.infill:
            if not GAP.search(text):
                raise UsageError(
                    f"{text[:60]!r} has no gap to fill", 'Mark one with ___, as in "Once ___ the end".'
                )

    def requests(self, prompts: Sequence[str], seeds: Any) -> list[Request]:
        if prompts and self.infill:
            raise UsageError("a text has a prompt or gaps, not both", "Write the prompt before the gap.")
        return super().requests(prompts or self.infill, seeds)


def generate(
    model: Any,
    tokenizer: Any,
    requests: list[Request],
    sampling: MaskedSampling,
    *,
    masked_share: Callable[[Tensor], Tensor] = lambda t: t,
    block: int | None = None,
    denoising: Callable[..., Denoising] | None = None,
    data: Mapping[str, Any] | None = None,
    context: int | None = None,
    batch: int = 16,
    streamer: BaseStreamer | None = None,
    finished: Callable[[int, Text], None] = lambda index, text: None,
    stepped: Callable[[range, int], None] | None = None,
    note: Callable[[str], None] = lambda text: None,
    watched: Callable[[int, Step], None] | None = None,
) -> list[Text]:
    """One text for each request, in their order; see `langevin.sampling.ar.generate`.

    masked_share is m, by which ancestral steps go, block is what a model's blocks hold, and denoising makes
    what writes a batch. watched(index, step) is told how each text begins and every step that changes
    something in it.
    """
    sampling.check()
    if batch < 1:
        raise UsageError(f"batch={batch} must be 1 or more")
    refuse_sweeps(sampling, block)
    canvases = [
        begun(tokenizer, request, sampling, model.config, data, context, block) for request in requests
    ]
    for canvas in canvases:
        refuse_too_long(model.config, canvas.prompt, len(canvas.tokens) - canvas.prompt)
    longest = max((len(canvas.tokens) for canvas in canvases), default=0)
    if context is not None and longest > context:
        note(f"up to {longest} tokens: beyond the {context} it was trained with")
    eos = model.config.eos_token_id
    ends = [eos] if isinstance(eos, int) else list(eos or ())
    texts: dict[int, Text] = {}
    for first in range(0, len(requests), batch):
        rows = range(first, min(first + batch, len(requests)))
        writing = (denoising or Denoising)(
            model,
            [canvases[i] for i in rows],
            sampling,
            [requests[i].seed for i in rows],
            masked_share,
            block,
            ends=() if sampling.fixed else ends,
            forbidden=ends if sampling.infill else (),
            watched=None if watched is None else partial(_told, watched, first),
        )
        while len(texts) < rows.stop:
            whole = writing.step()
            end = writing.end_B.tolist() if whole else []
            for row in whole:
                i = first + row
                new = writing.ids_BL[row, : end[row]].tolist()
                texts[i] = ended(tokenizer, requests[i], canvases[i], new, ends, sampling, writing.calls)
                finished(i, texts[i])
            if stepped is not None:
                stepped(rows, int((writing.asked_BL & ~writing.open_BL).sum(-1).max()))
        if streamer is not None:
            streamer.put(torch.tensor([tokenizer(texts[first].text, add_special_tokens=False).input_ids]))
            streamer.end()
    return [texts[i] for i in range(len(requests))]


def refuse_sweeps(sampling: MaskedSampling, block: int | None) -> None:
    if sampling.sweeps and block is not None:
        raise UsageError(
            "sweeps draw a token given those after it, which a model of blocks does not read",
            "Leave sweeps out, or use a model without blocks.",
        )


def rewritten(
    model: Any,
    tokens_BL: Tensor,
    open_BL: Tensor,
    sampling: MaskedSampling,
    *,
    masked_share: Callable[[Tensor], Tensor],
    block: int | None,
    denoising: Callable[..., Denoising] | None = None,
    asked_BL: Tensor | None = None,
) -> Tensor:
    """Whole texts after what is open of them was written anew, and what is asked for (by default what is
    open) swept."""
    asked_BL = open_BL if asked_BL is None else asked_BL
    found_BL, rows = tokens_BL.clone(), asked_BL.any(-1).nonzero().flatten().tolist()
    if not rows:
        return found_BL
    ids_BL = torch.where(open_BL, model.config.vocab_size - 1, tokens_BL)
    canvases = [Canvas(ids_BL[row].tolist(), asked_BL[row].tolist()) for row in rows]
    writing = (denoising or Denoising)(model, canvases, sampling, rows, masked_share, block)
    left = len(rows)
    while left:
        left -= len(writing.step())
    found_BL[rows] = writing.ids_BL.to(found_BL.dtype)
    return found_BL


def _told(watched: Callable[[int, Step], None], first: int, row: int, step: Step) -> None:
    watched(first + row, step)
