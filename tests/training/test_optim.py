"""Updates of the weights: Muon against torch's own, steps left out, scaled losses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from langevin.errors import WorkError
from langevin.settings import TrainConfig
from langevin.training.fitting import fewest_parts
from langevin.training.optim import Muon, Update, orthogonal


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6), nn.Linear(6, 10))


def with_gradients(model: nn.Module, seed: int = 1) -> nn.Module:
    draw = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=draw)
    return model


def test_muon_is_the_muon_of_torch() -> None:
    ours, theirs = two_layers(), two_layers()
    mine = Muon([{"params": [p for p in ours.parameters() if p.ndim == 2], "weight_decay": 0.1}])
    original = torch.optim.Muon([p for p in theirs.parameters() if p.ndim == 2], lr=0.02, weight_decay=0.1)
    for step in range(3):
        with_gradients(ours, step)
        with_gradients(theirs, step)
        mine.step()
        original.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)  # the iterations are in bfloat16


def test_newton_schulz_brings_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((2, 8, 20), (2, 20, 8)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape), Muon.COEFFICIENTS))
        assert values.min() > 0.5
        assert values.max() < 1.4


def test_averaged_weights_keep_no_graph_of_how_they_began() -> None:
    """Which would hold gradients to the stream they began on, and break the recording of a CUDA graph."""
    average = Update(two_layers(), TrainConfig(ema=0.9)).average
    assert average
    assert not any(x.requires_grad or x.grad_fn for x in average)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(optimizer: Any) -> None:
    model = two_layers()
    update = Update(model, TrainConfig(optimizer=optimizer))
    with_gradients(model)
    update()
    before = [p.detach().clone() for p in model.parameters()]
    states = [dict(s) for o in update.optimizers for s in o.state_dict()["state"].values()]
    copies = [{k: v.clone() for k, v in s.items()} for s in states]
    with_gradients(model, 2)
    next(model.parameters()).grad[0, 0] = float("nan")  # type: ignore[index]
    update()
    assert update.skipped.tolist() == [1, 1]
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old)
    for state, copy in zip(states, copies, strict=True):
        for name, value in copy.items():
            assert torch.equal(state[name], value), name
    with_gradients(model, 3)
    update()
    assert update.skipped.tolist() == [1, 0]
    assert not torch.equal(next(model.parameters()), before[0])


def test_the_average_stands_still_while_a_step_is_left_out() -> None:
    model = two_layers()
    update = Update(model, TrainConfig(ema=0.5))
    with_gradients(model)
    update()
    assert update.average is not None
    before = [x.clone() for x in update.average]
    next(with_gradients(model, 2).parameters()).grad[0, 0] = float("nan")  # type: ignore[index]
    update()
    for x, old in zip(update.average, before, strict=True):
        assert torch.equal(x, old)
    with_gradients(model, 3)
    update()
    for x, old, p in zip(update.average, before, model.parameters(), strict=True):
        torch.testing.assert_close(x, (old + 2 * p) / 3)  # weights 1/2 and 1, of the two steps there were


def after_each_step(update: Update, model: nn.Module, steps: int) -> list[list[torch.Tensor]]:
    seen = []
    for step in range(steps):
        with_gradients(model, step)
        update()
        seen.append([p.detach().clone() for p in model.parameters()])
    return seen


@pytest.mark.parametrize("decay", [0.3, 0.9, 0.9999])
def test_the_average_is_that_of_the_weights_seen_and_of_nothing_else(decay: float) -> None:
    model = two_layers()
    update = Update(model, TrainConfig(ema=decay, lr=0.1))
    seen = after_each_step(update, model, 12)
    share = torch.tensor([decay ** (12 - i) for i in range(1, 13)], dtype=torch.float64)
    for i, p in enumerate(model.parameters()):
        every = torch.stack([weights[i] for weights in seen])
        expected = torch.tensordot(share / share.sum(), every.double(), 1)
        with update.averaged_weights():
            torch.testing.assert_close(p.detach().double(), expected, rtol=1e-5, atol=1e-7)
            if decay == 0.9999:  # after few steps this is the plain mean
                torch.testing.assert_close(p.detach(), every.mean(0), rtol=1e-2, atol=1e-4)
        assert torch.equal(p, every[-1])


def test_a_first_step_that_is_left_out_leaves_the_average_at_the_start() -> None:
    model = two_layers()
    start = [p.detach().clone() for p in model.parameters()]
    update = Update(model, TrainConfig(ema=0.99))
    next(with_gradients(model).parameters()).grad[0, 0] = float("inf")  # type: ignore[index]
    update()
    with update.averaged_weights():
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), start, strict=True))
    (seen,) = after_each_step(update, model, 1)
    with update.averaged_weights():
        for p, new in zip(model.parameters(), seen, strict=True):
            torch.testing.assert_close(p.detach(), new)


def test_the_norm_that_is_told_is_the_mean_before_clipping_of_the_steps_that_had_one() -> None:
    model = two_layers()
    update = Update(model, TrainConfig(clip=0.1))
    norms = []
    for step in range(4):
        with_gradients(model, step)
        if step == 2:
            next(model.parameters()).grad[0, 0] = float("nan")  # type: ignore[index]
        else:
            norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()])))  # type: ignore[misc]
        update()
    assert update.mean_norm() == pytest.approx(sum(norms) / 3)
    assert math.isnan(update.mean_norm())


def test_large_gradients_are_clipped_to_the_norm() -> None:
    small, large = two_layers(), two_layers()
    with_gradients(small)
    norm = nn.utils.get_total_norm([p.grad for p in small.parameters() if p.grad is not None])
    for p, q in zip(small.parameters(), large.parameters(), strict=True):
        assert p.grad is not None
        q.grad = p.grad * 100
        p.grad = p.grad / norm
    Update(small, TrainConfig(clip=1.0))()
    Update(large, TrainConfig(clip=1.0))()
    for p, q in zip(small.parameters(), large.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_a_scaled_loss_gives_the_update_of_an_unscaled_one_and_halves_when_it_overflows() -> None:
    plain, half = two_layers(), two_layers()
    scaled = Update(half, TrainConfig(precision="fp16"))
    assert scaled.scale is not None
    for p, q in zip(with_gradients(plain).parameters(), half.parameters(), strict=True):
        assert p.grad is not None
        q.grad = p.grad * scaled.scale
    Update(plain, TrainConfig())()
    scaled()
    for p, q in zip(plain.parameters(), half.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert float(scaled.scale) == 65536
    next(half.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
    scaled()
    assert float(scaled.scale) == 32768


def test_the_fewest_parts_that_fit_are_found() -> None:
    tried: list[int] = []

    def fits(parts: int, room: int = 5) -> bool:
        tried.append(parts)
        return 24 // parts <= room

    assert fewest_parts(24, fits) == 8
    assert tried == [1, 2, 4, 8]
    assert fewest_parts(24, lambda parts: True) == 1
    with pytest.raises(WorkError, match="not even one sequence"):
        fewest_parts(6, lambda parts: False)
