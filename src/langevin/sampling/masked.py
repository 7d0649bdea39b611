"""Texts from a masked-diffusion model: many positions at once, in any order, around what is given.

A text starts as a canvas of the length that the model was trained with: what is given, and masks. Every
call of the network predicts all open positions, and a step then takes two draws: who is committed, and
what. `langevin.sampling.orders` has the orders, and how committed positions may be opened again.

Ancestral steps, first-hitting and a window of one position, which is from left to right, (with a call for
each token, at temperature 1) sample from the model; the other orders look for its modes. With fewer steps
than tokens a call commits several, each drawn as if it were alone. Where a step changes nothing, the
prediction stands and the network is not called again. The mask has no logit.

What was committed early was drawn with little to go by. So when a text is whole, sweeps may draw it again:
a call opens every eighth token, and draws them from what the model says given all others (Gibbs sampling;
a text keeps its length).

A model of blocks writes one block after another in this way; a finished block is read once more, and its
keys and values stay in a cache. On a GPU a call of the network is replayed as one CUDA graph.

Every text has a seed of its own, from which all its random numbers come: the same prompt and seed give the
same text in any batch. B texts in a batch, L positions, N of them in a block (or in all), V vocabulary, R
positions that are committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import StaticCache
from transformers.generation.streamers import BaseStreamer

from langevin.errors import Diverged, UsageError
from langevin.models.cache import step_back
from langevin.objectives.masked import TURNS, two_parts
from langevin.sampling.ar import WARM, drawn, refuse_too_long, warpers
from langevin.sampling.canvas import GAP, Canvas, begun, ended
from langevin.sampling.orders import Order, Remask, best_of_each, certainty, looped, remasking, uniform
from langevin.sampling.text import Request, Sampling, Step, Text
from langevin.training.graphs import Replayed

TURN_STRIDE = 3  # from the places of one turn of a sweep to those of the next: no neighbours


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
        if self.steps < 0:
            raise UsageError(f"steps={self.steps} must be 0 (as many as tokens) or more")
        if self.steps and self.order == "threshold":
            raise UsageError("--order threshold takes the steps that it needs", "Leave --steps out.")
        if self.window < 0:
            raise UsageError(f"window={self.window} must be 0 (anywhere) or more")
        if self.window and self.order == "ancestral":
            raise UsageError("ancestral steps commit anywhere", "Leave --window out, or choose an --order.")
        if self.sweeps < 0:
            raise UsageError(f"sweeps={self.sweeps} must be 0 (none) or more")
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
    longest = max((len(canvas.tokens) for canvas in canvases), default=0)
    refuse_too_long(model.config, longest, 0)
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


class Denoising:
    """A batch of texts being written: `step()` commits what is next and says which texts became whole.

    Two uniform numbers a position decide everything: `who` is the masked share at which a position is
    committed, or its place in a random order, and `what` chooses its token. Where positions are opened
    again, every step has numbers of its own. In a sweep, each turn opens its tokens and the next step draws
    them.
    """

    replays: ClassVar[bool] = True  # whether all that `inputs` looks at stays in its place

    @torch.no_grad()
    def __init__(
        self,
        model: Any,
        canvases: list[Canvas],
        sampling: MaskedSampling,
        seeds: list[int],
        masked_share: Callable[[Tensor], Tensor] = lambda t: t,
        block: int | None = None,
        ends: Sequence[int] = (),
        forbidden: Sequence[int] = (),
        watched: Callable[[int, Step], None] | None = None,
    ) -> None:
        self.model, self.sampling, self.share, self.watched = model, sampling, masked_share, watched
        self.mask, self.warpers = model.config.vocab_size - 1, warpers(sampling)
        self.remasks, device = sampling.remask != "none", model.device
        self.weighs = watched is not None or sampling.remask == "conf"  # how sure it was of what it wrote
        lengths = {len(canvas.tokens) for canvas in canvases}
        L = max(lengths)

        def rows(of: Callable[[Canvas], list[Any]], rest: Any) -> Tensor:
            return torch.tensor([[*of(c), *[rest] * (L - len(c.tokens))] for c in canvases], device=device)

        self.ids_BL = rows(lambda canvas: canvas.tokens, self.mask)
        self.asked_BL = rows(lambda canvas: canvas.asked, False)
        self.real_BL = rows(lambda canvas: [True] * len(canvas.tokens), False)
        self.padded = block is None and len(lengths) > 1
        self.seed_B = torch.tensor(seeds, device=device)
        self.place_L = torch.arange(L, device=device)
        self.which_211 = torch.arange(2, device=device)[:, None, None]
        self.numbers_2BL = self.anew_2BN = uniform(self.seed_B, self.place_L, self.which_211)
        self.ends = torch.tensor(ends, dtype=torch.long, device=device)
        self.forbidden = torch.tensor(forbidden, dtype=torch.long, device=device)
        self.asked_B = self.asked_BL.sum(-1)
        self.calls = 0  # of the network
        self.writing_B = torch.ones_like(self.asked_B, dtype=torch.bool)  # texts that are not whole
        self.stale_B = self.writing_B.clone()  # whose prediction is that of an earlier state
        self.stale = True  # whether there are any
        self.finite = self.writing_B.all()  # whether what was drawn from is
        self.logits_BLV: Tensor | None = None  # of the block at hand
        self.confidence_BL = (self.ids_BL != self.mask).double()
        self.committed_BL = torch.where(self.ids_BL == self.mask, -1, 0)
        self.shown_B = torch.zeros_like(self.asked_B)  # steps that changed something
        self.turn_B = torch.zeros_like(self.asked_B)  # of sweeps
        self.block = block or L
        self.cache = None if block is None else StaticCache(config=model.config, max_cache_len=L)
        self.input_BN = self.ids_BL if block is None else self.ids_BL[:, :block].clone()
        stream = torch.cuda.Stream(device) if self.replays and device.type == "cuda" else None
        self.all_rows = self.cache is not None or stream is not None  # shapes stay what they are
        self.read = Replayed(self._read, stream, after=WARM, what="calls of the network")
        self._look()
        given = int(self.open_BL.any(0).byte().argmax()) // self.block * self.block
        if given:  # whole blocks of all texts
            seen = two_parts(given, self.block, device)[..., :given, :given]
            model(input_ids=self.ids_BL[:, :given], attention_mask=seen, past_key_values=self.cache)
        self._go_to(given)
        self._show(self.writing_B)

    def _look(self) -> None:
        """What is asked for and not committed; where texts end, with the first token that ends one, or
        where nothing more is known or asked; and what is open before that. For whoever changes ids_BL."""
        known_BL = self.ids_BL != self.mask
        self.open_BL = self.asked_BL & ~known_BL
        last_B = torch.where(self.asked_BL | known_BL, self.place_L, -1).amax(-1)
        over_BL = torch.isin(self.ids_BL, self.ends) & self.asked_BL
        first_B = torch.where(over_BL, self.place_L, len(self.place_L)).amin(-1)
        self.end_B = torch.minimum(first_B, last_B) + 1
        self.missing_BL = self.open_BL & (self.place_L < self.end_B[:, None])

    @torch.no_grad()
    def step(self) -> list[int]:
        """On a GPU every question that the host asks waits for all that was launched: there are up to
        three, and more at the end of a block or where somebody watches."""
        if self.stale:
            self._predict()
        chosen_BN, opened_BN = self._chosen()
        if self.sampling.sweeps:
            chosen_BN = torch.where(self.turn_B[:, None] > 0, self.missing_BL, chosen_BN)
        changed_B = (chosen_BN if opened_BN is None else chosen_BN | opened_BN).any(-1)
        self.shown_B += changed_B
        row_R, at_R = chosen_BN.nonzero(as_tuple=True)
        if len(row_R):
            self._commit(row_R, at_R)
        if opened_BN is not None:
            self.ids_BL[:, self.here].masked_fill_(opened_BN, self.mask)
            self.committed_BL[:, self.here].masked_fill_(opened_BN, -1)
        self._look()
        self._show(changed_B)
        self.taken += 1
        whole_B = self.writing_B & ~self.missing_BL.any(-1)
        going_B = self.writing_B
        if self.remasks or self.cache is not None:
            going_B = self.open_BL[:, self.here].any(-1)
            whole_B &= self.end_B <= self.here.stop
        if self.remasks:
            going_B |= self.taken < self.steps_B
            whole_B &= ~going_B
        if self.sampling.sweeps:
            swept_B = whole_B & (self.turn_B < TURNS * self.sampling.sweeps)
            changed_B = torch.where(swept_B, self._sweep(swept_B), changed_B)
            whole_B &= ~swept_B
        self.writing_B &= ~whole_B
        self.stale_B.copy_(changed_B & self.writing_B)
        ways = torch.stack([self.finite, self.stale_B.any(), (going_B & self.writing_B).any()])
        finite, self.stale, going, *whole = torch.cat([ways, whole_B]).tolist()
        self._refuse_unless(finite)
        if self.cache is not None and not going:
            self._next_block()
        return [row for row, done in enumerate(whole) if done]

    def _sweep(self, some_B: Tensor) -> Tensor:
        """Open the tokens of some texts whose turn it is, none of them the end; which texts have any."""
        turn_BL = self.place_L % TURNS == self.turn_B[:, None] * TURN_STRIDE % TURNS
        here_BL = self.asked_BL & some_B[:, None] & (self.place_L < self.end_B[:, None])
        open_BL = here_BL & turn_BL & ~torch.isin(self.ids_BL, self.ends)
        self.ids_BL.masked_fill_(open_BL, self.mask)
        self.turn_B += some_B
        self._look()
        return open_BL.any(-1)

    def _next_block(self) -> None:
        """Keep what was written, and go on."""
        if bool(self.writing_B.any()):
            self._call()
            assert self.cache is not None
            step_back(self.cache, -self.block)
            self._go_to(self.here.stop)

    def _go_to(self, first: int) -> None:
        """To the block that begins there, where a text has its share of the steps."""
        self.here, self.taken = slice(first, first + self.block), 0
        self.first_B = self.asked_BL[:, self.here].sum(-1)  # positions to write
        self.steps_B = self.first_B
        if self.sampling.steps:
            before_B = self.asked_BL[:, :first].sum(-1)
            self.steps_B = self._steps_for(before_B + self.first_B) - self._steps_for(before_B)
            if self.sampling.order != "ancestral":
                self.steps_B = torch.minimum(self.steps_B, self.first_B)
        self.steps_B = self.steps_B.clamp_min(1)
        self.stale_B.copy_(self.writing_B & (self.first_B > 0))
        self.stale = bool(self.stale_B.any())

    def _steps_for(self, tokens_B: Tensor) -> Tensor:
        return (self.sampling.steps * tokens_B / self.asked_B).round().long()

    def _predict(self) -> None:
        """Logits of the texts that changed."""
        self._call()
        if self.watched is not None:
            assert self.logits_BLV is not None
            likeliest_BN = self.logits_BLV.softmax(-1).amax(-1).double()
            fresh_BN = (self.ids_BL[:, self.here] == self.mask) & self.stale_B[:, None]
            known_BN = self.confidence_BL[:, self.here]
            self.confidence_BL[:, self.here] = torch.where(fresh_BN, likeliest_BN, known_BN)

    def _call(self) -> None:
        self.calls += 1
        if self.cache is not None:
            self.input_BN.copy_(self.ids_BL[:, self.here])
        self.read()

    def _read(self) -> None:
        """Call the network, and put the logits of texts that changed into their place."""
        some_B = slice(None) if self.all_rows else self.stale_B
        real = self.real_BL[some_B] if self.padded else None
        more = {} if self.cache is None else {"past_key_values": self.cache}
        out = self.model(attention_mask=real, **self.inputs(some_B), **more)
        logits = out.logits
        if self.cache is not None:
            step_back(self.cache, self.block)
        logits.index_fill_(-1, self.forbidden, -torch.inf)
        if self.logits_BLV is None:
            self.logits_BLV = logits
        elif self.all_rows:
            self.logits_BLV.copy_(torch.where(self.stale_B[:, None, None], logits, self.logits_BLV))
        else:
            self.logits_BLV[self.stale_B] = logits

    def inputs(self, some_B: Any) -> dict[str, Any]:
        """What the network reads of some texts, or of all (a slice); `logits_BLV` are those of the call
        before (None: none)."""
        return {"input_ids": self.input_BN[some_B]}

    def _chosen(self) -> tuple[Tensor, Tensor | None]:
        """Which open positions are committed in this step, and which committed ones are opened (None: none
        ever is), (B, N)."""
        sampling, here = self.sampling, self.here
        order, who_BN, writing_B1 = sampling.order, self._uniform(0), self.writing_B[:, None]
        if order == "ancestral":
            times = (
                (1 - at / self.steps_B[:, None].double()).clamp_min(0)
                for at in (self.taken, self.taken + 1)
            )
            if sampling.remask == "loop":
                times = (looped(t) for t in times)
            m_B1, after_B1 = (self.share(t) for t in times)
            open_BN = self.open_BL[:, here] & writing_B1
            if not self.remasks:
                return open_BN & (who_BN >= after_B1), None
            committed_BN, p_BN = (self.asked_BL & ~self.open_BL)[:, here] & writing_B1, self.confidence_BL
            opens, commits_B1 = remasking(
                sampling.remask, sampling.eta, m_B1, after_B1, p_BN[:, here], committed_BN
            )
            return open_BN & (who_BN < commits_B1), committed_BN & (who_BN < opens)
        open_BN = self.missing_BL[:, here] & writing_B1  # nobody reads on behind the end
        number_BN, count_B1 = open_BN.cumsum(-1) - 1, open_BN.sum(-1, keepdim=True)
        left_B1 = count_B1 if order == "threshold" else self.steps_B[:, None] - self.taken
        commits_B1 = -(-count_B1 // left_B1.clamp_min(1))
        if sampling.window:
            count_B1 = torch.minimum(count_B1, commits_B1.clamp_min(sampling.window))
            open_BN = open_BN & (number_BN < count_B1)
        if order == "first-hitting":
            score_BN = torch.where(open_BN, who_BN, -torch.inf)
        else:
            assert self.logits_BLV is not None
            some, score_BN = open_BN.nonzero(as_tuple=True), torch.full_like(who_BN, -torch.inf)
            score_BN[some] = certainty(self.logits_BLV[some], order).double()
        group_BN = (number_BN * commits_B1 // count_B1.clamp_min(1)).clamp_min(0)
        chosen_BN = best_of_each(score_BN, group_BN)
        if order == "threshold":
            chosen_BN |= score_BN > sampling.threshold
        return open_BN & chosen_BN, None

    def _commit(self, row_R: Tensor, at_R: Tensor) -> None:
        """Draw tokens for some positions of the block at hand."""
        assert self.logits_BLV is not None
        logits_RV = raw_RV = self.logits_BLV[row_R, at_R]
        self.finite = raw_RV.amax(-1).isfinite().all()
        if self.weighs:  # what is drawn of NaN has no probability
            self._refuse_unless(bool(self.finite))
        if self.sampling.sweeps:
            swept_R1 = self.turn_B[row_R, None] > 0
            logits_RV = torch.where(swept_R1, raw_RV.index_fill(-1, self.ends, -torch.inf), raw_RV)
        for warper in self.warpers:
            logits_RV = warper(None, logits_RV)
        token_R = logits_RV.argmax(-1)
        if self.sampling.temperature:
            token_R = drawn(logits_RV, self._uniform(1)[row_R, at_R][:, None])[:, 0]
        at_R = at_R + self.here.start
        self.ids_BL[row_R, at_R] = token_R
        if self.weighs:
            p_RV = raw_RV.softmax(-1, dtype=torch.float64)
            self.confidence_BL[row_R, at_R] = p_RV.gather(-1, token_R[:, None])[:, 0]
            self.committed_BL[row_R, at_R] = self.shown_B[row_R]

    def _refuse_unless(self, finite: bool) -> None:
        if not finite:
            raise Diverged("the model's predictions are not finite", "Try an earlier checkpoint.")

    def _uniform(self, which: int) -> Tensor:
        once_BN = self.numbers_2BL[which][:, self.here]
        if not self.remasks and not self.sampling.sweeps:
            return once_BN
        if which == 0:  # which is asked for first
            self.anew_2BN = uniform(self.seed_B, self.place_L[self.here], 2 * self.taken + self.which_211)
        anew_BN = self.anew_2BN[which]
        return anew_BN if self.remasks else torch.where(self.turn_B[:, None] > 0, anew_BN, once_BN)

    def _show(self, some_B: Tensor) -> None:
        if self.watched is None:
            return
        for row in some_B.nonzero().flatten().tolist():
            own = slice(int(self.end_B[row]))
            committed = [None if at < 0 else at for at in self.committed_BL[row, own].tolist()]
            step = Step(self.ids_BL[row, own].tolist(), self.confidence_BL[row, own].tolist(), committed)
            self.watched(row, step)
