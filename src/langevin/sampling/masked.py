"""Texts from a masked-diffusion model: many positions at once, in any order, around what is given.

A text starts as a canvas of the length that the model was trained with: what is given, and masks. Every
call of the network predicts all open positions, and a step then takes two draws: who is committed, and
what.

    ancestral       each open position with probability 1 - m(s)/m(t), from time t to s: the process itself
    first-hitting   the same in continuous time, which is: positions in random order, one a call
    confidence      where the likeliest token has the largest probability
    margin          where it is furthest ahead of the second
    entropy         where the prediction has the least entropy
    threshold       wherever the likeliest token has more than a given probability, or the best place

The first two (first-hitting with a call for each token, at temperature 1) sample from the model; the others
look for its modes. With fewer steps than tokens a call commits several, each drawn as if it were alone.
Where a step commits nothing, the prediction stands and the network is not called again. The mask has no
logit.

Every text has a seed of its own, from which all its random numbers come: the same prompt and seed give the
same text in any batch. B texts in a batch, L positions, V vocabulary, N positions that are committed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from langevin.data.tokenizers import encode_prompt
from langevin.errors import UsageError
from langevin.sampling.ar import drawn, random_numbers, refuse_too_long, warpers
from langevin.sampling.text import Ended, Request, Sampling, Text, up_to_stop
from langevin.sampling.trace import Step

Order = Literal["ancestral", "first-hitting", "confidence", "margin", "entropy", "threshold"]
GAP = re.compile("_{3,}")
GAP_TOKENS = 16


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
    threshold: float = 0.9
    """What --order threshold is sure of."""
    fixed: bool = False
    """Write all tokens, and go on after the end of a text."""
    infill: tuple[str, ...] = ()
    """Texts with gaps to fill, such as "Once ___ the end", in place of --prompt."""

    def check(self) -> None:
        super().check()
        if self.steps < 0:
            raise UsageError(f"steps={self.steps} must be 0 (as many as tokens) or more")
        if self.steps and self.order == "threshold":
            raise UsageError("--order threshold takes the steps that it needs", "Leave --steps out.")
        if not 0 <= self.threshold < 1:
            raise UsageError(f"threshold={self.threshold} must be from 0 to below 1")
        for text in self.infill:
            if not GAP.search(text):
                raise UsageError(
                    f"{text[:60]!r} has no gap to fill", 'Mark one with ___, as in "Once ___ the end".'
                )

    def requests(self, prompts: Sequence[str], seeds: Any) -> list[Request]:
        if prompts and self.infill:
            raise UsageError("a text has a prompt or gaps, not both", "Write the prompt before the gap.")
        return super().requests(prompts or self.infill, seeds)


@dataclass(frozen=True)
class Canvas:
    """Where a text starts: tokens with the mask's id where they are open, and which of these are asked for
    (the others stay open: the model is used to a whole context)."""

    tokens: list[int]
    asked: list[bool]
    prompt: int = 0  # tokens before the first that is asked for


def generate(
    model: Any,
    tokenizer: Any,
    requests: list[Request],
    sampling: MaskedSampling,
    *,
    masked_share: Callable[[Tensor], Tensor] = lambda t: t,
    data: Mapping[str, Any] | None = None,
    context: int | None = None,
    batch: int = 16,
    streamer: BaseStreamer | None = None,
    finished: Callable[[int, Text], None] = lambda index, text: None,
    stepped: Callable[[range, int], None] = lambda texts, tokens: None,
    note: Callable[[str], None] = lambda text: None,
    watched: Callable[[int, Step], None] | None = None,
) -> list[Text]:
    """One text for each request, in their order; see `langevin.sampling.ar.generate`.

    masked_share is m, by which ancestral steps go. watched(index, step) is told how each text begins and
    every step that commits something in it, as in `langevin.sampling.trace`.
    """
    sampling.check()
    if batch < 1:
        raise UsageError(f"batch={batch} must be 1 or more")
    canvases = [_canvas(tokenizer, request, sampling, model.config, data, context) for request in requests]
    longest = max((len(canvas.tokens) for canvas in canvases), default=0)
    refuse_too_long(model.config, longest, 0)
    if context is not None and longest > context:
        note(f"up to {longest} tokens: beyond the {context} it was trained with")
    eos = model.config.eos_token_id
    ends = [eos] if isinstance(eos, int) else list(eos or ())
    texts: dict[int, Text] = {}
    for first in range(0, len(requests), batch):
        rows = range(first, min(first + batch, len(requests)))
        writing = Denoising(
            model,
            [canvases[i] for i in rows],
            sampling,
            [requests[i].seed for i in rows],
            masked_share,
            ends=() if sampling.fixed else ends,
            forbidden=ends if sampling.infill else (),
            watched=None if watched is None else partial(_told, watched, first),
        )
        while len(texts) < rows.stop:
            for row in writing.step():
                i = first + row
                new = writing.ids_BL[row, : writing.end_B[row]].tolist()
                text = _text(tokenizer, requests[i], canvases[i], new, ends, sampling)
                texts[i] = replace(text, calls=writing.calls)
                finished(i, texts[i])
            stepped(rows, int((writing.asked_BL & ~writing.open_BL).sum(-1).max()))
        if streamer is not None:
            streamer.put(torch.tensor([tokenizer(texts[first].text, add_special_tokens=False).input_ids]))
            streamer.end()
    return [texts[i] for i in range(len(requests))]


def _told(watched: Callable[[int, Step], None], first: int, row: int, step: Step) -> None:
    watched(first + row, step)


class Denoising:
    """A batch of texts being written: `step()` commits what is next and says which texts became whole.

    Two uniform numbers a position decide everything: `who` is the masked share at which a position is
    committed, or its place in a random order, and `what` chooses its token.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: Any,
        canvases: list[Canvas],
        sampling: MaskedSampling,
        seeds: list[int],
        masked_share: Callable[[Tensor], Tensor] = lambda t: t,
        ends: Sequence[int] = (),
        forbidden: Sequence[int] = (),
        watched: Callable[[int, Step], None] | None = None,
    ) -> None:
        self.model, self.sampling, self.share, self.watched = model, sampling, masked_share, watched
        self.mask, self.forbidden, self.warpers = model.config.vocab_size - 1, forbidden, warpers(sampling)
        self.lengths = [len(canvas.tokens) for canvas in canvases]
        L = max(self.lengths)

        def rows(of: Callable[[int], Any], rest: Any) -> Tensor:
            every = [[*of(i), *[rest] * (L - n)] for i, n in enumerate(self.lengths)]
            return torch.tensor(every).to(model.device)

        uniform = [random_numbers([seed], 2 * n)[0] for seed, n in zip(seeds, self.lengths, strict=True)]
        self.who_BL = rows(lambda i: uniform[i][::2].tolist(), 0.0).double()
        self.what_BL = rows(lambda i: uniform[i][1::2].tolist(), 0.0).double()
        self.ids_BL = rows(lambda i: canvases[i].tokens, self.mask)
        self.asked_BL = rows(lambda i: canvases[i].asked, False)
        self.real_BL = rows(lambda i: [True] * self.lengths[i], False)
        self.place_L = torch.arange(L, device=model.device)
        self.ends = torch.tensor(ends, dtype=torch.long, device=model.device)
        self.first_B = self.asked_BL.sum(-1)  # positions open at first
        self.steps_B = self.first_B.clone()
        if sampling.steps and sampling.order == "ancestral":
            self.steps_B.fill_(sampling.steps)
        elif sampling.steps:
            self.steps_B.clamp_(max=sampling.steps)
        self.taken, self.calls = 0, 0  # steps, and calls of the network
        self.writing_B = torch.ones_like(self.first_B, dtype=torch.bool)  # texts that are not whole
        self.stale_B = self.writing_B.clone()  # whose prediction is that of an earlier state
        self.logits_BLV: Tensor | None = None
        self.confidence_BL = (self.ids_BL != self.mask).double()
        self.committed_BL = torch.where(self.ids_BL == self.mask, -1, 0)
        self.shown_B = torch.zeros_like(self.first_B)  # steps that committed something
        self._show(self.writing_B)

    @property
    def open_BL(self) -> Tensor:
        """What is asked for and not committed."""
        return self.asked_BL & (self.ids_BL == self.mask)

    @property
    def end_B(self) -> Tensor:
        """Where texts end: with the first token that ends one, or where nothing more is known or asked."""
        known_BL = self.asked_BL | (self.ids_BL != self.mask)
        last_B = torch.where(known_BL, self.place_L, -1).amax(-1)
        over_BL = torch.isin(self.ids_BL, self.ends) & self.asked_BL
        first_B = torch.where(over_BL, self.place_L, len(self.place_L)).amin(-1)
        return torch.minimum(first_B, last_B) + 1

    @torch.no_grad()
    def step(self) -> list[int]:
        self._predict()
        chosen_BL = self._chosen(self.open_BL & self.writing_B[:, None])
        self.taken += 1
        changed_B = chosen_BL.any(-1)
        self.stale_B = torch.zeros_like(changed_B)
        if not bool(changed_B.any()):
            return []
        assert self.logits_BLV is not None
        logits_NV = self.logits_BLV[chosen_BL]
        p_NV = logits_NV.softmax(-1, dtype=torch.float64)
        for warper in self.warpers:
            logits_NV = warper(None, logits_NV)
        token_N = logits_NV.argmax(-1)
        if self.sampling.temperature:
            token_N = drawn(logits_NV, self.what_BL[chosen_BL][:, None])[:, 0]
        self.ids_BL[chosen_BL] = token_N
        self.confidence_BL[chosen_BL] = p_NV.gather(-1, token_N[:, None])[:, 0]
        self.shown_B += changed_B
        self.committed_BL = torch.where(chosen_BL, self.shown_B[:, None], self.committed_BL)
        self._show(changed_B)
        missing_BL = self.open_BL & (self.place_L < self.end_B[:, None])
        whole_B = self.writing_B & ~missing_BL.any(-1)
        self.writing_B &= ~whole_B
        self.stale_B = changed_B & self.writing_B
        return [int(row) for row in whole_B.nonzero()]

    def _predict(self) -> None:
        """Logits of the texts that changed."""
        if not bool(self.stale_B.any()):
            return
        ids_BL, padded = self.ids_BL[self.stale_B], len(set(self.lengths)) > 1
        logits = self.model(ids_BL, attention_mask=self.real_BL[self.stale_B] if padded else None).logits
        self.calls += 1
        if self.forbidden:
            logits[..., list(self.forbidden)] = -torch.inf
        if self.logits_BLV is None or len(logits) == len(self.ids_BL):
            self.logits_BLV = logits
        else:
            self.logits_BLV[self.stale_B] = logits
        if self.watched is not None:
            likeliest = logits.softmax(-1).amax(-1).double()
            known = self.confidence_BL[self.stale_B]
            self.confidence_BL[self.stale_B] = torch.where(ids_BL == self.mask, likeliest, known)

    def _chosen(self, open_BL: Tensor) -> Tensor:
        """Which open positions are committed in this step."""
        order = self.sampling.order
        then_B = (1 - (self.taken + 1) / self.steps_B.double()).clamp_min(0)  # the time after it
        if order == "ancestral":
            return open_BL & (self.who_BL >= self.share(then_B)[:, None])
        score_BL = self.who_BL
        if order != "first-hitting":
            assert self.logits_BLV is not None
            score_BL = torch.zeros_like(self.who_BL)
            score_BL[open_BL] = _certainty(self.logits_BLV[open_BL], order).double()
        score_BL = torch.where(open_BL, score_BL, -torch.inf)
        rank_BL = score_BL.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        if order == "threshold":
            return open_BL & ((score_BL > self.sampling.threshold) | (rank_BL == 0))
        left_B = (self.first_B * then_B + 1e-9).long()
        return open_BL & (rank_BL < (open_BL.sum(-1) - left_B).clamp_min(1)[:, None])

    def _show(self, some_B: Tensor) -> None:
        if self.watched is None:
            return
        end_B = self.end_B
        for row in some_B.nonzero().flatten().tolist():
            own = slice(int(end_B[row]))
            committed = [None if at < 0 else at for at in self.committed_BL[row, own].tolist()]
            step = Step(self.ids_BL[row, own].tolist(), self.confidence_BL[row, own].tolist(), committed)
            self.watched(row, step)


def _certainty(logits_NV: Tensor, order: Order) -> Tensor:
    p_NV = logits_NV.float().softmax(-1)
    if order == "entropy":
        return torch.special.xlogy(p_NV, p_NV).sum(-1)
    if order == "margin":
        best = p_NV.topk(2, dim=-1).values
        return best[:, 0] - best[:, 1]
    return p_NV.amax(-1)


def _canvas(
    tokenizer: Any,
    request: Request,
    sampling: MaskedSampling,
    config: Any,
    data: Mapping[str, Any] | None,
    context: int | None,
) -> Canvas:
    """What is given of a text, with masks where it is to be written, as long as the context."""
    mask = config.vocab_size - 1
    before, *after = GAP.split(request.prompt) if sampling.infill else (request.prompt,)
    tokens = encode_prompt(tokenizer, before.rstrip() if after else before, data)
    given, prompt = [True] * len(tokens), len(tokens)
    asked = sampling.tokens or (GAP_TOKENS * len(after) if after else (context or 0) - prompt)
    if asked < max(1, len(after)):
        raise UsageError(
            f"{max(0, asked)} tokens are to be written after a prompt of {prompt}",
            "Shorten the prompt, or give --tokens.",
        )
    parts = after or [""]
    for i, text in enumerate(parts):
        masks = (i + 1) * asked // len(parts) - i * asked // len(parts)
        last = i + 1 == len(parts)
        ids = encode_prompt(tokenizer, text if last else text.rstrip(), {}) if text.strip() else []
        tokens += [mask] * masks + ids
        given += [False] * masks + [True] * len(ids)
    rest = max(0, (context or 0) - len(tokens))
    return Canvas(tokens + [mask] * rest, [not known for known in given] + [False] * rest, prompt)


def _text(
    tokenizer: Any,
    request: Request,
    canvas: Canvas,
    tokens: list[int],
    ends: Sequence[int],
    sampling: MaskedSampling,
) -> Text:
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    why: Ended = "end" if tokens[-1] in ends and canvas.asked[len(tokens) - 1] else "length"
    if sampling.stop:
        cut = up_to_stop(
            text, tokenizer.decode(tokens[: canvas.prompt], skip_special_tokens=True), sampling.stop
        )
        text, why = (cut, "stop") if cut != text else (text, why)
    return Text(request.prompt, request.seed, text, sum(canvas.asked[: len(tokens)]), why)
