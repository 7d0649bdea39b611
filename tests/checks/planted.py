"""Mistakes that published code really made, to see that `langevin check` names them."""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from langevin.mixers import SoftmaxMechanism


def scores(q, k):
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def mask(q, k, causal, key_padding_mask=None, documents=None):
    Q, K = q.shape[2], k.shape[2]
    seen = torch.ones(1, 1, Q, K, dtype=torch.bool)
    if causal:
        seen = seen.tril(K - Q)
    if key_padding_mask is not None:
        seen = seen & key_padding_mask[:, None, None]
    if documents is not None:
        seen = seen & (documents[:, None, K - Q :, None] == documents[:, None, None])
    return seen


def softmax(z, seen):
    z = z.masked_fill(~seen, float("-inf"))
    return torch.where(seen.any(-1, keepdim=True), torch.softmax(z, -1).nan_to_num(), 0.0)


def honest(q, k, v, *, causal, key_padding_mask=None, documents=None):
    """No mistake: plain softmax attention, as a user would write it."""
    return softmax(scores(q, k), mask(q, k, causal, key_padding_mask, documents)) @ v


def sima_over_all_tokens(q, k, v, *, causal):
    """Normalised over all tokens, future ones included, with only the scores masked."""
    q, k = F.normalize(q, p=1, dim=-2), F.normalize(k, p=1, dim=-2)
    return (q @ k.transpose(-1, -2)).masked_fill(~mask(q, k, causal), 0) @ v


def time_from_unmasked_scores(q, k, v, *, causal):
    """An adaptive temperature from statistics of the whole score matrix."""
    t = (1 + scores(q, k).mean((-1, -2), keepdim=True).sigmoid()) / 2
    return softmax(scores(q, k) / t, mask(q, k, causal)) @ v


def ssmax_with_tensor_length(q, k, v, *, causal, key_padding_mask=None):
    """n taken from the tensor instead of from what a query sees."""
    z = 0.43 * math.log(k.shape[2]) * scores(q, k)
    return softmax(z, mask(q, k, causal, key_padding_mask)) @ v


def ssmax_with_query_length(q, k, v, *, causal):
    """n from the position among the queries passed: right without a cache, wrong with one."""
    n = torch.arange(1, q.shape[2] + 1)[:, None]
    return softmax(0.43 * n.log() * scores(q, k), mask(q, k, causal)) @ v


def additive_ssmax(q, k, v, *, causal):
    """0.1 log j added to the logits instead of s log n multiplying them."""
    j = torch.arange(1, k.shape[2] + 1)
    return softmax(scores(q, k) + 0.1 * j.log(), mask(q, k, causal)) @ v


class CircularNeighbours(nn.Module):
    """Shifts that wrap around: the first token hears the last."""

    def __init__(self, width):
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.left(x.roll(1, 1)) + self.right(x.roll(2, 1))


class BleedingPadding(nn.Module):
    """Padding is masked at the end only, so it reaches real tokens through their neighbours."""

    def __init__(self, width, causal):
        super().__init__()
        self.tap = nn.Linear(width, width)
        self.causal = causal

    def forward(self, x, key_padding_mask=None):
        for _ in range(2):
            left = F.pad(x[:, :-1], (0, 0, 1, 0))
            right = 0 if self.causal else F.pad(x[:, 1:], (0, 0, 0, 1))
            x = x + self.tap(left + right)
        return x if key_padding_mask is None else x * key_padding_mask[..., None]


class NoisyEvaluation(nn.Module):
    """Noise that nobody switches off."""

    def __init__(self, width):
        super().__init__()
        self.out = nn.Linear(width, width)

    def forward(self, x):
        return self.out(x) + 0.1 * torch.randn_like(x)


class SymmetricSmoothing(nn.Module):
    """A heat step on the line graph before a causal loss: x_{i+1} flows into position i."""

    def __init__(self, width):
        super().__init__()
        self.out = nn.Linear(width, width)

    def forward(self, x):
        left, right = F.pad(x[:, :-1], (0, 0, 1, 0)), F.pad(x[:, 1:], (0, 0, 0, 1))
        return self.out(x + 0.1 * (left + right - 2 * x))


class SamplesReadEachOther(nn.Module):
    """A mean over the batch, as a normalisation over the wrong dimension takes it."""

    def __init__(self, width):
        super().__init__()
        self.out = nn.Linear(width, width)

    def forward(self, x):
        y = self.out(x)
        return y + y.mean(0)


@dataclass(frozen=True)
class WindowIgnored(SoftmaxMechanism):
    def attend(self, x):
        return super().attend(replace(x, view=replace(x.view, window=None)))


@dataclass(frozen=True)
class RepeatedHeads(SoftmaxMechanism):
    """Key heads repeated as a whole: query head h reads key head h mod (key heads)."""

    def attend(self, x):
        groups = x.q_BHQD.shape[1] // x.k_BHKD.shape[1]
        k, v = (y.repeat(1, groups, 1, 1) for y in (x.k_BHKD, x.v_BHKD))
        return super().attend(replace(x, k_BHKD=k, v_BHKD=v))


class DiagonalBackward(torch.autograd.Function):
    """Softmax attention whose backward pass forgets every block of 64 × 64 off the diagonal."""

    @staticmethod
    def forward(ctx, q, k, v, seen):
        w = softmax(scores(q, k), seen)
        ctx.save_for_backward(q, k, v, w)
        return w @ v

    @staticmethod
    def backward(ctx, grad):
        q, k, v, w = ctx.saved_tensors
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        w = w * (i // 64 == j // 64)
        dz = (
            w
            * (grad @ v.transpose(-1, -2) - (grad * (w @ v)).sum(-1, keepdim=True))
            / math.sqrt(q.shape[-1])
        )
        return dz @ k, dz.transpose(-1, -2) @ q, w.transpose(-1, -2) @ grad, None


def diagonal_backward(q, k, v, *, causal, key_padding_mask=None, documents=None):
    return DiagonalBackward.apply(q, k, v, mask(q, k, causal, key_padding_mask, documents))


def no_gradient_if_masked(q, k, v, *, causal, key_padding_mask=None, documents=None):
    out = honest(q, k, v, causal=causal, key_padding_mask=key_padding_mask, documents=documents)
    return out if key_padding_mask is documents is None else out.detach() + 0 * q


def padding_ignored_if_packed(q, k, v, *, causal, key_padding_mask=None, documents=None):
    return honest(
        q,
        k,
        v,
        causal=causal,
        key_padding_mask=key_padding_mask if documents is None else None,
        documents=documents,
    )


class Convolution(nn.Module):
    """No mistake: a causal convolution by FFT, in which rounding carries the future into the past."""

    leak = 0.0

    def __init__(self, width):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(40, width))

    def forward(self, x):
        n = x.shape[1] + len(self.kernel)
        y = torch.fft.irfft(torch.fft.rfft(x, n, 1) * torch.fft.rfft(self.kernel, n, 0), n, 1)[
            :, : x.shape[1]
        ]
        return y + self.leak * x.roll(-1, 1)


class NormalisedConvolution(Convolution):
    """No mistake."""

    def forward(self, x):
        return F.layer_norm(super().forward(x), x.shape[-1:])


class LeakingConvolution(Convolution):
    """A leak of one part in 10¹²."""

    leak = 1e-12


class Failing(nn.Module):
    """An error of a kind of its own."""

    def __init__(self, width):
        super().__init__()
        self.out = nn.Linear(width, width)

    def forward(self, x):
        raise LookupError("no table for these tokens")


class InFloat32(nn.Module):
    """No mistake: it computes in float32, whatever comes."""

    def __init__(self, width):
        super().__init__()
        self.out = nn.Linear(width, width)

    def forward(self, x):
        y = F.rms_norm(x.float(), x.shape[-1:]).to(x.dtype)
        return self.out(y + F.pad(y[:, :-1], (0, 0, 1, 0)))


class OnlyInFloat32(InFloat32):
    """No mistake: in float64 it does not work at all."""

    def forward(self, x):
        return super().forward(x @ torch.eye(x.shape[-1], dtype=torch.float32))


def without_causal(q, k, v):
    """No mistake: bidirectional attention."""
    return softmax(scores(q, k), mask(q, k, False)) @ v


def causal_not_forwarded(q, k, v, *, causal):
    return without_causal(q, k, v)


def always_causal(q, k, v):
    """No mistake: causal attention without a choice."""
    return softmax(scores(q, k), mask(q, k, True)) @ v


def options_forwarded(q, k, v, **options):
    """No mistake."""
    return honest(q, k, v, **options)
