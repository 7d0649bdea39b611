"""A mixer's own state in a transformers cache, in the place of the keys and values of every token.

Whatever generation does to a cache (beams reordered, batches repeated or selected, a reset) happens to the
state too. What a state cannot do is forget its last tokens, and `crop` says so.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from langevin.errors import UsageError

State = tuple[Tensor, ...]


class StateLayer(CacheLayerMixin):
    """Tensors (B, ...) that stand for the tokens so far; zeros stand for none.

    In a static cache, which has max_cache_len, they are written in place, so that a CUDA graph finds them
    where they were. A layer that keeps tokens has them all, or the last of a window.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self, max_cache_len: int | None, keeps_tokens: bool, window: int | None) -> None:
        super().__init__()
        self.max_cache_len, self.keeps_tokens, self.window = max_cache_len, keeps_tokens, window
        self.is_compileable = max_cache_len is not None
        self.state: State | None = None
        self.cumulative_length: Any = 0  # a tensor in a static cache, as its other layers have it

    def store(self, state: State, tokens: int) -> None:
        """The state after that many more tokens."""
        if self.max_cache_len is None:  # clones, for a part would hold on to the whole it was cut from
            self.state = tuple(x.clone() for x in state)
            self.cumulative_length += tokens
        elif self.state is None:
            self.state = tuple(x.detach().clone() for x in state)
            self.cumulative_length = torch.full((), tokens, device=state[0].device)
            if not torch.compiler.is_compiling():
                for x in (*self.state, self.cumulative_length):
                    torch._dynamo.mark_static_address(x)
        else:
            for kept, new in zip(self.state, state, strict=True):
                kept.copy_(new.detach())
            self.cumulative_length.add_(tokens)

    def extended(self, *new: Tensor) -> State:
        """The tokens kept followed by the new ones, (B, ..., tokens, D), which are kept too."""
        every = new
        if self.state is not None:
            every = tuple(torch.cat(pair, -2) for pair in zip(self.state, new, strict=True))
        gone = 0 if self.window is None else max(0, every[0].shape[-2] - self.window + 1)
        self.store(tuple(x[..., gone:, :] for x in every), new[0].shape[-2])
        return every

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The new keys and values as they came: the mixer adds them to the state itself."""
        return key_states, value_states

    def get_seq_length(self) -> Any:
        return 0 if self.state is None else self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.max_cache_len is not None:
            return self.max_cache_len, 0
        length = self.get_seq_length()
        gone = 0 if self.window is None else max(0, length - self.window + 1)
        return length - gone + query_length, gone

    def get_max_length(self) -> int:
        return -1 if self.max_cache_len is None else self.max_cache_len

    get_max_cache_shape = get_max_length  # its name before transformers 5.17

    def reset(self) -> None:
        if self.max_cache_len is None:
            self.state, self.cumulative_length = None, 0
        elif self.state is not None:
            for x in (*self.state, self.cumulative_length):
                x.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._each(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._each(lambda x: x[indices])

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        self.state = None if self.state is None else tuple(change(x) for x in self.state)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0 and self.state is not None:
            raise UsageError(
                "the cache holds a state of constant size, from which the last tokens cannot be taken away",
                "Generate without drafts (no assistant_model, no prompt lookup), or with use_cache=False.",
            )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: what is kept is known when it is stored."""


def state_layer(cache: Cache, index: int, keeps_tokens: bool = False) -> StateLayer:
    """The layer of a cache that holds a mixer's state; it takes the place of an empty one of other kind."""
    layer = _layer(cache, index)
    if isinstance(layer, StateLayer):
        if layer.state is None and layer.max_cache_len is None:
            layer.keeps_tokens = keeps_tokens or layer.window is not None
        return layer
    slots = getattr(layer, "max_cache_len", None)
    window = getattr(layer, "sliding_window", None)
    keeps_tokens = keeps_tokens or layer.is_sliding
    if keeps_tokens and slots is not None:
        raise UsageError(
            f"a {type(cache).__name__} has no room for the past queries that this mixer keeps",
            "Decode with a DynamicCache, the default, or without a window and attention weights.",
        )
    if not torch.compiler.is_compiling() and int(layer.get_seq_length()) > 0:
        raise UsageError("the cache holds keys and values of another mixer", "Start from an empty cache.")
    cache.layers[index] = made = StateLayer(slots, keeps_tokens, window)
    return made


def step_back(cache: Cache, tokens: int) -> None:
    """Take the last tokens of a static cache away (a negative number brings them back), in place."""
    for layer in cache.layers:
        layer.cumulative_length.sub_(tokens)


def extent(cache: Cache | None, index: int, tokens: int, whole: bool = False) -> tuple[Any, int]:
    """How many keys come before the new tokens (None where those are the last), and how many there are.

    In a static cache the first is a tensor, and there are as many keys as slots. The first tokens of all
    need look no further than at each other, unless the whole is asked for.
    """
    if cache is None:
        return None, tokens
    layer = _layer(cache, index)
    past, slots = layer.get_seq_length(), getattr(layer, "max_cache_len", None)
    if slots is None:
        return None, past + tokens
    return past, slots if whole or isinstance(past, Tensor) else tokens


def _layer(cache: Cache, index: int) -> Any:
    while len(cache.layers) <= index and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    return cache.layers[index]
