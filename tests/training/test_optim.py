"""Updates of the weights: Muon against torch's own, steps left out, scaled losses."""

from __future__ import annotations

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
    before = [x.clone() for x in update.average.values()]
    next(with_gradients(model, 2).parameters()).grad[0, 0] = float("nan")  # type: ignore[index]
    update()
    for x, old in zip(update.average.values(), before, strict=True):
        assert torch.equal(x, old)
    with_gradients(model, 3)
    update()
    for x, old, p in zip(update.average.values(), before, model.parameters(), strict=True):
        torch.testing.assert_close(x, (old + p) / 2)


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
