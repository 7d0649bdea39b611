"""Texts from a language model, token by token: many at once, each as if it were alone.

Prompts of different lengths are padded on the left into one batch. Every text has a seed of its own, from
which all its random numbers come before anything is written, so the same prompt and seed give the same text
in any batch (up to the rounding of a kernel, which may differ with the size of the batch).

    token = the first one with  Σ_{v <= token} p(v) > u,      u uniform in [0, 1)

The cache has its final size from the beginning and a step changes tensors in their places only: nothing has
to be planned anew for every length, and on a GPU a step is replayed as one CUDA graph.

B texts in a batch, T new tokens, V vocabulary.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.streamers import BaseStreamer

from langevin.data.tokenizers import encode_prompt
from langevin.errors import UsageError
from langevin.sampling.text import Ended, Request, Sampling, Text, up_to_stop
from langevin.training.graphs import Replayed

WARM = 2  # steps before one is captured as a graph


def generate(
    model: Any,
    tokenizer: Any,
    requests: list[Request],
    sampling: Sampling,
    *,
    data: Mapping[str, Any] | None = None,
    context: int | None = None,
    batch: int = 16,
    streamer: BaseStreamer | None = None,
    finished: Callable[[int, Text], None] = lambda index, text: None,
    stepped: Callable[[range, int], None] = lambda texts, tokens: None,
    note: Callable[[str], None] = lambda text: None,
) -> list[Text]:
    """One text for each request, in their order.

    data is the manifest of what the model was trained on, which says how its texts began.
    finished(index, text) is called as soon as a text ends; stepped(indices, tokens) after every token of a
    batch. A streamer (transformers') shows the tokens of a single text as they come. note is told when
    texts grow beyond the context that the model was trained with.
    """
    sampling.check()
    if batch < 1:
        raise UsageError(f"batch={batch} must be 1 or more")
    prompts = [encode_prompt(tokenizer, request.prompt, data) for request in requests]
    longest = max(map(len, prompts), default=0)
    refuse_too_long(model.config, longest, sampling.tokens)
    if context is not None and longest + sampling.tokens > context:
        note(f"up to {longest + sampling.tokens} tokens: beyond the {context} it was trained with")
    ends = _eos(model, tokenizer)
    texts: dict[int, Text] = {}
    for first in range(0, len(requests), batch):
        rows = range(first, min(first + batch, len(requests)))
        seeds = [requests[i].seed for i in rows]
        decoding = Decoding(model, [prompts[i] for i in rows], sampling, seeds, pad=ends[0] if ends else 0)
        new: dict[int, list[int]] = {i: [] for i in rows}  # of the texts that are still open
        if streamer is not None:
            streamer.put(torch.tensor([prompts[first]]))
        for tokens in range(1, sampling.tokens + 1):
            for i, token in zip(rows, decoding.next(), strict=True):
                if i in new:
                    new[i].append(token)
                    if streamer is not None and token not in ends:
                        streamer.put(torch.tensor([token]))
            for i in list(new):
                why = _ended(new[i], tokenizer, ends, sampling)
                if why is not None:
                    texts[i] = _text(tokenizer, requests[i], prompts[i], new.pop(i), why, sampling.stop)
                    finished(i, texts[i])
            stepped(rows, tokens)
            if not new:
                break
        if streamer is not None:
            streamer.end()
    return [texts[i] for i in range(len(requests))]


class Decoding:
    """A batch of texts being written: `next()` gives the next token of each."""

    @torch.no_grad()
    def __init__(
        self, model: Any, prompts: list[list[int]], sampling: Sampling, seeds: list[int], pad: int = 0
    ) -> None:
        self.model, device = model, model.device
        B, length = len(prompts), max(map(len, prompts))
        room = length + sampling.tokens
        self.ids = torch.tensor([[pad] * (length - len(p)) + p for p in prompts], device=device)
        self.real = torch.zeros(B, room, dtype=torch.long, device=device)
        for row, prompt in zip(self.real, prompts, strict=True):
            row[length - len(prompt) :] = 1
        self.padded = any(len(p) < length for p in prompts)
        self.place = (self.real[:, :length].cumsum(-1) - 1).clamp_min(0)
        self.cache = StaticCache(config=model.config, max_cache_len=room)
        self.warpers = warpers(sampling)
        self.u_BT = random_numbers(seeds, sampling.tokens).to(device)
        self.written = torch.zeros((), dtype=torch.long, device=device)  # tokens so far
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.step = Replayed(self._step, stream, after=WARM, what="decoding steps")
        self.begun = False

    @torch.no_grad()
    def next(self) -> list[int]:
        self.step(self.begun)  # the prompt has a shape of its own, which comes once
        self.begun = True
        tokens: list[int] = self.ids[:, 0].tolist()
        return tokens

    def _step(self) -> None:
        """Read the tokens in hand, choose the next ones, and put them into their place."""
        logits = self.model(
            self.ids,
            attention_mask=self.real if self.padded else None,
            position_ids=self.place,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        token = self._choose(logits)
        self.written += 1
        # What a step reads has its place from here on.
        self.ids, self.place = self.ids[:, -1:].contiguous(), self.place[:, -1:].contiguous()
        self.ids.copy_(token)
        self.place += 1

    def _choose(self, logits_BV: Tensor) -> Tensor:
        if not self.warpers:
            return logits_BV.argmax(-1, keepdim=True)
        for warper in self.warpers:
            logits_BV = warper(None, logits_BV)
        return drawn(logits_BV, self.u_BT.gather(1, self.written.expand(len(self.u_BT), 1)))


def warpers(sampling: Sampling) -> list[Any]:
    """What the temperature and the filters do to logits; nothing where the likeliest token is taken."""
    if not sampling.temperature:
        return []
    found: list[Any] = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        found.append(TopPLogitsWarper(sampling.top_p))
    return found


def random_numbers(seeds: list[int], tokens: int) -> Tensor:
    """Uniform in [0, 1), a row for each seed."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return torch.stack([torch.rand(tokens, generator=g, dtype=torch.float64) for g in generators])


def drawn(logits_BV: Tensor, u_B1: Tensor) -> Tensor:
    """The token that a uniform number chooses, (B, 1)."""
    below_BV = logits_BV.softmax(-1, dtype=torch.float64).cumsum(-1)
    return torch.searchsorted(below_BV, u_B1 * below_BV[:, -1:], right=True)


def _ended(new: list[int], tokenizer: Any, ends: list[int], sampling: Sampling) -> Ended | None:
    """Why a text ends with its last token, if it does."""
    if new[-1] in ends:
        return "end"
    if sampling.stop:  # a token has a byte or more, so the last ones hold a stop string that just ended
        tail = new[-4 - max(len(stop.encode()) for stop in sampling.stop) :]
        text = tokenizer.decode(tail, skip_special_tokens=True)
        if any(stop in text for stop in sampling.stop):
            return "stop"
    return "length" if len(new) == sampling.tokens else None


def _text(
    tokenizer: Any, request: Request, prompt: list[int], new: list[int], why: Ended, stops: tuple[str, ...]
) -> Text:
    text = tokenizer.decode(prompt + new, skip_special_tokens=True)
    if why == "stop":
        text = up_to_stop(text, tokenizer.decode(prompt, skip_special_tokens=True), stops)
    return Text(request.prompt, request.seed, text, len(new), why, len(new), tuple(new))


def _eos(model: Any, tokenizer: Any) -> list[int]:
    eos = model.generation_config.eos_token_id
    eos = tokenizer.eos_token_id if eos is None else eos
    return [eos] if isinstance(eos, int) else list(eos or ())


def refuse_too_long(config: Any, prompt: int, tokens: int) -> None:
    limit = getattr(config, "max_position_embeddings", None)
    if getattr(config, "positions", None) == "learned" and limit and prompt + tokens > limit:
        raise UsageError(
            f"a prompt of {prompt} tokens and {tokens} more do not fit {limit} positions",
            "Shorten the prompt or --tokens.",
        )
