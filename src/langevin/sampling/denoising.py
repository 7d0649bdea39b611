"""A batch of texts that come out of masks: many positions at once, in any order, around what is given.

A text starts as a canvas of the length that the model was trained with: what is given, and masks. Every
call of the network predicts all open positions, and a step then takes two draws: who is committed, and
what. `langevin.sampling.orders` has the orders, and how committed positions may be opened again. With fewer
steps than tokens a call commits several, each drawn as if it were alone. Where a step changes nothing, the
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

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from transformers import StaticCache

from langevin.errors import Diverged
from langevin.models.cache import step_back
from langevin.objectives.masked import TURNS, two_parts
from langevin.sampling.ar import WARM, drawn, warpers
from langevin.sampling.canvas import Canvas
from langevin.sampling.orders import best_of_each, certainty, looped, remasking, uniform
from langevin.sampling.text import Step
from langevin.training.graphs import Replayed

if TYPE_CHECKING:
    from langevin.sampling.masked import MaskedSampling

TURN_STRIDE = 3  # from the places of one turn of a sweep to those of the next: no neighbours


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
