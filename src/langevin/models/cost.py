"""What a model costs before it runs: FLOPs by its shape, utilisation by what the device could do."""

import math
import re
from typing import Any

from torch import nn

from langevin.mixers.neighbor import NeighborMixer
from langevin.models.attention import QKV
from langevin.models.ngrams import NGrams
from langevin.models.patches import Patches

# Dense bfloat16 FLOP/s that vendors state, by a part of the device's name; the first that fits counts.
PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "L4": 121e12,
    "A10": 125e12,
}


def flops_of(model: Any, context: int, block: int | None = None) -> float:
    """Training FLOPs a token, forward and backward.

    6 for each parameter that a token is multiplied with (all matrices, the output head among them, its
    share of an image's convolutions, what is read once a text as if every token were, tables that are only
    looked up not), and for each attention module:
    6 · width · context where it is causal and sees half the context on average; 12 · width · head width for
    a recurrent mixer; nothing for an attention-free one, whose work is in its matrices. With blocks, every
    token is read twice and predicted once, and sees its block and those before it.
    """
    looked_up = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))
    output = model.get_output_embeddings()  # none in a classifier
    head = 0 if output is None else output.weight.numel()
    own = {id(p): p.numel() for p in model.parameters() if p.ndim == 2}
    tied = output is not None and output.weight is model.get_input_embeddings().weight
    matrices, mixing = sum(own.values()) - looked_up + (head if tied else 0), 0.0
    for module in model.modules():
        if isinstance(module, NeighborMixer) and module.config.shared:  # its steps use the same matrices
            once = sum(p.numel() for p in module.steps.parameters() if p.ndim == 2)
            matrices += (module.config.iters - 1) * once
        elif isinstance(module, Patches):
            matrices += module.products / math.prod(model.config.grid)
        elif isinstance(module, NGrams):  # a row for the token, and one for its pair
            matrices += 2 * module.bias.numel()
        elif isinstance(module, QKV):
            head_dim, recurrent = module.geometry.head_dim, module.mechanism.recurrent
            seen = context if getattr(model.config, "causal", True) else 2 * context
            seen = seen if block is None else 2 * (context + block)
            mixing += module.geometry.heads * head_dim * (12 * head_dim if recurrent else 6 * seen)
    return 6.0 * (matrices if block is None else 2 * matrices - head) + mixing


def peak_flops(device_name: str) -> float | None:
    """What the vendor says the device can do; None where we do not know it."""
    return next((p for name, p in PEAKS.items() if re.search(rf"\b{name}\b", device_name)), None)
