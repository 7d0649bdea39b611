"""The training order and the evaluation windows, on streams small enough to count everything."""

import subprocess
import sys

import numpy as np
import pytest

from langevin.data import order
from langevin.errors import UsageError

SIZES = [(7, 3, 2), (64, 8, 4), (100, 63, 1), (101, 8, 5), (257, 16, 7), (500, 1, 9), (50, 49, 3)]


def targets(tokens, context, batch, steps, seed=0):
    """The positions of all targets, in the order in which they are trained on."""
    starts = [
        order.window_starts(tokens, step, seed=seed, batch=batch, context=context) for step in range(steps)
    ]
    return np.concatenate([order.windows(tokens, s, context + 1)[:, 1:].ravel() for s in starts])


@pytest.mark.parametrize(("tokens", "context", "batch"), SIZES)
def test_every_epoch_visits_every_target_once_also_where_batches_cross_its_end(tokens, context, batch):
    epochs = 5
    steps = -(-epochs * tokens // (context * batch))
    seen = targets(tokens, context, batch, steps)
    for epoch in range(epochs):
        once = np.sort(seen[epoch * tokens : (epoch + 1) * tokens])
        assert np.array_equal(once, np.arange(tokens))


@pytest.mark.parametrize(("tokens", "context", "batch"), SIZES)
def test_a_window_is_contiguous_round_the_end_of_the_stream(tokens, context, batch):
    starts = order.window_starts(tokens, 3, seed=1, batch=batch, context=context)
    rows = order.windows(tokens, starts, context + 1)
    assert rows.shape == (batch, context + 1)
    assert np.array_equal((rows[:, :-1] + 1) % tokens, rows[:, 1:])


def test_the_order_depends_on_seed_and_epoch_and_nothing_else():
    tokens, context, batch = 1000, 10, 10
    first = targets(tokens, context, batch, 20)
    assert np.array_equal(first, targets(tokens, context, batch, 20))
    assert not np.array_equal(first, targets(tokens, context, batch, 20, seed=1))
    assert not np.array_equal(first[:tokens], first[tokens:])


def test_the_batch_size_does_not_change_the_order():
    assert np.array_equal(targets(101, 8, 6, 20), targets(101, 8, 3, 40))


def test_another_process_gives_the_same_order():
    here = order.window_starts(12345, 678, seed=9, batch=4, context=100).tolist()
    code = (
        "from langevin.data import order;"
        "print(order.window_starts(12345, 678, seed=9, batch=4, context=100).tolist())"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert there.stdout.strip() == str(here)


def test_the_order_is_the_same_in_every_release():
    """Resuming an old run must read the same batches: these numbers never change."""
    starts = order.window_starts(1000, 5, seed=0, batch=4, context=10)
    assert starts.tolist() == [850, 780, 280, 910]


@pytest.mark.parametrize("context", [0, 100, 101])
def test_a_context_that_does_not_fit_is_refused(context):
    with pytest.raises(UsageError, match="does not fit a split of 100 tokens"):
        order.window_starts(100, 0, seed=0, batch=1, context=context)
