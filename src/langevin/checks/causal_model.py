"""The properties of a whole causal language model, tried on token ids.

B batch, L tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from langevin.checks.comparing import close, same_bits, slope
from langevin.checks.report import Broken, NotOffered
from langevin.errors import UsageError

LENGTH = 24

PROPERTIES: dict[str, Callable[[Any], str]] = {}


def named(name: str) -> Callable[[Callable[[Any], str]], Callable[[Any], str]]:
    def add(function: Callable[[Any], str]) -> Callable[[Any], str]:
        PROPERTIES[name] = function
        return function

    return add


def load(path: Path) -> Any:
    """A saved causal model, in float64."""
    from langevin.models.convert import from_pretrained

    model = from_pretrained(path)
    if not hasattr(model, "generate") or model.config.is_encoder_decoder:
        raise UsageError(
            f"{path} holds a {type(model).__name__}, not a causal language model",
            "Save a model of the kind AutoModelForCausalLM loads.",
        )
    return model.double().eval()


@named("no future leak")
def no_future_leak(model: Any) -> str:
    """Changing token j changes no logits before j, bit for bit, in training and evaluation."""
    ids = _ids(model)
    for training in (False, True):
        model.train(training)
        try:
            before = _logits(model, ids)
            for j in (1, LENGTH // 2, LENGTH - 1):
                changed = ids.clone()
                changed[:, j] = (changed[:, j] + 1) % model.config.vocab_size
                mode = "training" if training else "evaluation"
                after = _logits(model, changed)
                same_bits(before[:, :j], after[:, :j], f"changing token {j} ({mode})")
        finally:
            model.eval()
    return "6 perturbations, bit for bit"


@named("prefix = full")
def prefix_equals_full(model: Any) -> str:
    ids = _ids(model)
    full = _logits(model, ids)
    for m in (1, 2, LENGTH // 2, LENGTH - 1):
        close(_logits(model, ids[:, :m]), full[:, :m], f"the prefix of {m} tokens")
    return "the same logits for prefixes"


@named("cached = full")
def cached_equals_full(model: Any) -> str:
    ids = _ids(model)
    full = _logits(model, ids)
    for prefill in (1, 6):
        past, parts = None, []
        for start, stop in [(0, prefill), *((i, i + 1) for i in range(prefill, LENGTH))]:
            with torch.no_grad():
                out = model(ids[:, start:stop], past_key_values=past, use_cache=True)
            past = out.past_key_values
            parts.append(out.logits)
        close(torch.cat(parts, 1), full, f"cached decoding after {prefill} tokens")
    return "token by token = one call"


@named("padding")
def padding_changes_nothing(model: Any) -> str:
    ids = _ids(model)
    alone = _logits(model, ids)
    for amount in (1, 5):
        for token in (0, model.config.vocab_size - 1):
            junk = torch.full((ids.shape[0], amount), token)
            real = torch.ones_like(ids)
            for side in ("left", "right"):
                parts = [(junk, torch.zeros_like(junk)), (ids, real)]
                if side == "right":
                    parts.reverse()
                padded, mask = (torch.cat(pair, 1) for pair in zip(*parts, strict=True))
                place = (mask.cumsum(1) - 1).clamp_min(0)
                out = _logits(model, padded, attention_mask=mask, position_ids=place)
                out = out[:, amount:] if side == "left" else out[:, :-amount]
                close(out, alone, f"{amount} padding tokens on the {side}")
    return "8 paddings, same logits"


@named("packed documents")
def documents_do_not_mix(model: Any) -> str:
    lengths = (5, 8, LENGTH - 13)
    ids = _ids(model)
    place = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    packed = _logits(model, ids, position_ids=place, use_cache=False)
    for i, part in enumerate(ids.split(lengths, 1)):
        close(packed.split(lengths, 1)[i], _logits(model, part), f"document {i}, packed")
    return "each as if alone, told apart by position_ids"


@named("evaluation is deterministic")
def evaluation_is_deterministic(model: Any) -> str:
    ids = _ids(model)
    same_bits(_logits(model, ids, 1), _logits(model, ids, 2), "running with two seeds")
    return "two seeds, same bits"


@named("gradients")
def gradients_are_right(model: Any) -> str:
    """Along the input embeddings, against central differences in float64."""
    ids = _ids(model)[:, :9]
    x = model.get_input_embeddings()(ids).detach().requires_grad_()
    cotangent = torch.randn(*ids.shape, model.config.vocab_size, dtype=x.dtype)

    def value() -> Tensor:
        return (model(inputs_embeds=x).logits * cotangent).sum()

    (grad,) = torch.autograd.grad(value(), x)
    for _ in range(3):
        direction = torch.randn_like(x)
        backpropagated = float((grad * direction).sum())
        measured = slope(value, x, direction)
        error = abs(backpropagated - measured) / max(1.0, abs(measured))
        if error < 1e-5:
            return f"relative error {error:.0e}"
    raise Broken(f"the gradient of the embeddings is {backpropagated:.6g}, by differences {measured:.6g}")


@named("finite")
def finite_everywhere(model: Any) -> str:
    """A batch with a fully padded sequence gives finite logits."""
    ids = _ids(model)
    mask = torch.ones_like(ids)
    mask[0] = 0
    bad = ~_logits(model, ids, attention_mask=mask).isfinite()
    if bool(bad.any()):
        position = int(bad.nonzero()[0, 1])
        raise Broken(f"a fully padded sequence: the logits at position {position} are not finite")
    return "logits finite"


@named("compiles")
def compiles_without_graph_breaks(model: Any) -> str:
    ids = _ids(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    try:
        with torch.no_grad():
            out = compiled(ids, use_cache=False).logits
    except Exception as error:
        raise Broken(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error
    close(out, _logits(model, ids), "compiled forward", tolerance=1e-6)
    return "one graph"


def _ids(model: Any) -> Tensor:
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and limit < LENGTH + 5:
        raise NotOffered(f"the model has only {limit} positions")
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, model.config.vocab_size, (2, LENGTH), generator=generator)


def _logits(model: Any, ids: Tensor, seed: int = 0, **options: Any) -> Tensor:
    torch.manual_seed(seed)
    with torch.no_grad():
        logits: Tensor = model(ids, **options).logits
    return logits
