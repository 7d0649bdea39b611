"""Texts from a masked-diffusion model: many positions at once, in any order, around what is given.

A text starts as a canvas of the length that the model was trained with: what is given, and masks. Every
call of the network predicts all open positions, and a step then takes two draws: who is committed, and
what.

    ancestral       each open position with probability 1 - m(s)/m(t), from time t to s; the process itself
    first-hitting   the same in continuous time, that is: positions in random order, one a call
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
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from langevin.data.tokenizers import encode_prompt
from langevin.errors import UsageError
from langevin.sampling.ar import drawn, refuse_too_long, warpers
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
    temperature: float = 0.8
    """0: always the likeliest token; 1: as the model says."""
    steps: int = 0
    """Steps to write them in, of a network call each; 0: as many as tokens."""
    order: Order = "ancestral"
    """Which positions are committed first."""
    threshold: float = 0.9
    """What --order threshold is sure of."""
    fixed: bool = False
    """Write all tokens, and go on after the end of a text."""
    infill: tuple[str, ...] = ()
    """Texts with gaps to fill, such as "Once ___ the end", in place of --prompt."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 0:
            raise UsageError(f"steps={self.steps} must be 0 (as many as tokens) or more")
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
        while writing.rows:
            for row in writing.step():
                i = first + row
                new = writing.text(row)
                texts[i] = _text(tokenizer, requests[i], canvases[i], new, ends, sampling)
                finished(i, texts[i])
            stepped(rows, writing.written)
        if streamer is not None:
            streamer.put(torch.tensor([tokenizer(texts[first].text, add_special_tokens=False).input_ids]))
            streamer.end()
    return [texts[i] for i in range(len(requests))]


def _told(watched: Callable[[int, Step], None], first: int, row: int, step: Step) -> None:
    watched(first + row, step)


class Denoising:
    """A batch of texts being written: `step()` commits what is next and says which texts are whole, until
    none of its `rows` is left."""

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
        self.model, self.sampling, self.watched = model, sampling, watched
        self.ends, self.forbidden = torch.tensor(ends, dtype=torch.long), list(forbidden)
        device, self.mask = model.device, model.config.vocab_size - 1
        self.lengths = [len(canvas.tokens) for canvas in canvases]
        L = max(self.lengths)
        self.ids_BL = torch.tensor(
            [c.tokens + [self.mask] * (L - n) for c, n in zip(canvases, self.lengths, strict=True)]
        ).to(device)
        self.asked_BL = torch.tensor(
            [c.asked + [False] * (L - n) for c, n in zip(canvases, self.lengths, strict=True)]
        ).to(device)
        self.real_BL = torch.arange(L, device=device) < torch.tensor(self.lengths, device=device)[:, None]
        self.warpers = warpers(sampling)
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.first_B = self.asked_BL.sum(-1)  # what is open at first
        self.steps_B = self.first_B.clone()
        if sampling.steps and sampling.order == "ancestral":
            self.steps_B.fill_(sampling.steps)
        elif sampling.steps:
            self.steps_B.clamp_(max=sampling.steps)
        self.share, self.taken = masked_share, 0
        self.rows = list(range(len(canvases)))  # that are not whole yet
        self.stale = list(self.rows)  # whose prediction is that of an earlier state
        self.calls = 0
        self.logits_BLV: Tensor | None = None
        self.confidence_BL = (~self.asked_BL & (self.ids_BL != self.mask)).double()
        self.committed_BL = torch.where(self.ids_BL == self.mask, -1, 0)
        self.shown = [0] * len(canvases)  # steps told of each text
        for row in self.rows:
            self._show(row)

    @property
    def written(self) -> int:
        """Tokens of the longest text so far."""
        return int((self.asked_BL & (self.ids_BL != self.mask)).sum(-1).max())

    def text(self, row: int) -> list[int]:
        """The tokens of a text up to its end."""
        return self.ids_BL[row, : self._end(row)].tolist()

    @torch.no_grad()
    def step(self) -> list[int]:
        self._predict()
        open_BL = self.asked_BL & (self.ids_BL == self.mask)
        open_BL[[row not in self.rows for row in range(len(open_BL))]] = False
        u_2BL = torch.zeros(2, *open_BL.shape, dtype=torch.float64)
        for row in self.rows:
            u_2BL[:, row, : self.lengths[row]] = torch.rand(
                2, self.lengths[row], generator=self.generators[row], dtype=torch.float64
            )
        who_BL, what_BL = u_2BL.to(open_BL.device)
        chosen_BL = self._chosen(open_BL, who_BL)
        self.taken += 1
        if bool(chosen_BL.any()):
            assert self.logits_BLV is not None
            logits_NV = self.logits_BLV[chosen_BL]
            p_NV = logits_NV.softmax(-1, dtype=torch.float64)
            if self.sampling.temperature:
                for warper in self.warpers:
                    logits_NV = warper(None, logits_NV)
                token_N = drawn(logits_NV, what_BL[chosen_BL][:, None])[:, 0]
            else:
                token_N = logits_NV.argmax(-1)
            self.ids_BL[chosen_BL] = token_N
            self.confidence_BL[chosen_BL] = p_NV.gather(-1, token_N[:, None])[:, 0]
        changed = chosen_BL.any(-1).tolist()
        self.stale = [row for row in self.rows if changed[row]]
        for row in self.stale:
            self.shown[row] += 1
            self.committed_BL[row, chosen_BL[row]] = self.shown[row]
            self._show(row)
        whole = [row for row in self.stale if not bool(self._missing(row).any())]
        self.rows = [row for row in self.rows if row not in whole]
        self.stale = [row for row in self.stale if row not in whole]
        return whole

    def _predict(self) -> None:
        """Logits of the texts that changed, and by the way the confidence at open positions."""
        if not self.stale:
            return
        some = torch.tensor(self.stale, device=self.ids_BL.device)
        real_BL = self.real_BL[some]
        padded = len(set(self.lengths)) > 1
        logits = self.model(self.ids_BL[some], attention_mask=real_BL if padded else None).logits
        self.calls += 1
        if self.forbidden:
            logits[..., self.forbidden] = -torch.inf
        if len(some) == len(self.ids_BL):
            self.logits_BLV = logits
        else:
            assert self.logits_BLV is not None
            self.logits_BLV[some] = logits
        if self.watched is not None:
            likeliest = logits.softmax(-1).amax(-1).double()
            seen = self.confidence_BL[some]
            self.confidence_BL[some] = torch.where(self.ids_BL[some] == self.mask, likeliest, seen)

    def _chosen(self, open_BL: Tensor, who_BL: Tensor) -> Tensor:
        """Which open positions are committed in this step."""
        order = self.sampling.order
        now_B = (1 - self.taken / self.steps_B.double()).clamp_min(0)
        then_B = (1 - (self.taken + 1) / self.steps_B.double()).clamp_min(0)
        if order == "ancestral":
            stays_B = self.share(then_B) / self.share(now_B).clamp_min(1e-300)
            return open_BL & (who_BL >= stays_B[:, None])
        if order == "first-hitting":
            score_BL = who_BL
        else:
            score_BL = torch.zeros_like(who_BL)
            assert self.logits_BLV is not None
            score_BL[open_BL] = _certainty(self.logits_BLV[open_BL], order).double()
        score_BL = torch.where(open_BL, score_BL, -torch.inf)
        rank_BL = score_BL.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        if order == "threshold":
            return open_BL & ((score_BL > self.sampling.threshold) | (rank_BL == 0))
        left_B = (self.first_B * then_B + 1e-9).long()
        count_B = (open_BL.sum(-1) - left_B).clamp_min(1)
        return open_BL & (rank_BL < count_B[:, None])

    def _end(self, row: int) -> int:
        """Where a text ends: with the first token that ends one, or where nothing more is asked for."""
        tokens, asked = self.ids_BL[row].cpu(), self.asked_BL[row].cpu()
        found = (torch.isin(tokens, self.ends) & asked).nonzero()
        last = found[:1] if len(found) else (asked | (tokens != self.mask)).nonzero()[-1:]
        return int(last) + 1

    def _missing(self, row: int) -> Tensor:
        """Which positions of a text are still to be committed."""
        end = self._end(row)
        return (self.asked_BL[row] & (self.ids_BL[row] == self.mask))[:end]

    def _show(self, row: int) -> None:
        if self.watched is None:
            return
        n = self.lengths[row]
        committed = [None if at < 0 else at for at in self.committed_BL[row, :n].tolist()]
        self.watched(
            row, Step(self.ids_BL[row, :n].tolist(), self.confidence_BL[row, :n].tolist(), committed)
        )


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
