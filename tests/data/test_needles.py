"""The generator of needles: what is asked for can be found, and only where it was hidden."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from langevin import data
from langevin.data.synthetic.needle import Draw, Haystack, hidden, queried, recurring
from training.small_run import TEXT

ROWS, LENGTH, NEEDLES = 400, 64, 4


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Haystack:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(TEXT)
    corpus = data.prepare(str(path), tokenizer="bytes", progress=False)
    return Haystack(corpus.vocab_size, 16, 16, corpus)


@pytest.fixture(params=["noise", "text"])
def hay(request: Any) -> Any:
    return Haystack(16, 16, 16) if request.param == "noise" else request.getfixturevalue("text")


def layouts() -> dict[str, Any]:
    anywhere = Draw(1).below(LENGTH - 2, ROWS)
    return {
        "recurring": recurring(Draw(0), ROWS, LENGTH, NEEDLES),
        "hidden": hidden(Draw(0), anywhere, LENGTH, NEEDLES),
        "first": hidden(Draw(0), np.zeros(ROWS, int), LENGTH, NEEDLES),
        "last": hidden(Draw(0), np.full(ROWS, LENGTH - 3), LENGTH, NEEDLES),
        "one": hidden(Draw(0), anywhere, LENGTH, 1),
        "queried": queried(Draw(0), ROWS, LENGTH, NEEDLES),
        "full": queried(Draw(0), ROWS, 4 * 16, 16),
    }


@pytest.mark.parametrize("kind", layouts())
def test_an_oracle_finds_every_answer_and_none_stands_outside_its_needle(kind: str, hay: Haystack) -> None:
    layout = layouts()[kind]
    rows = hay.rows(Draw(3), "test", layout, int(layout[1].max()) + 1)
    keys = range(hay.words, hay.words + hay.keys)
    for tokens, scored in zip(rows["tokens"].tolist(), rows["scored"].tolist(), strict=True):
        known: dict[int, int] = {}
        for i, token in enumerate(tokens[:-1]):
            if token in keys:
                follows = tokens[i + 1]
                assert scored[i + 1] == (token in known)
                assert known.setdefault(token, follows) == follows
        assert sum(scored) >= (kind != "recurring")
        assert len(set(known.values())) == len(known)  # no value has two keys
        behind = [b for a, b in pairwise(tokens) if a in keys]
        assert sorted(behind) == sorted(t for t in tokens if t >= hay.words + hay.keys)


def test_a_row_is_as_long_as_it_says_and_holds_as_many_needles() -> None:
    hay = Haystack(16, 16, 16)
    for kind, layout in layouts().items():
        rows = hay.rows(Draw(3), "train", layout, int(layout[1].max()) + 1)["tokens"]
        assert rows.shape == (ROWS, LENGTH + 1)
        assert (rows[:, -1] >= 32).all(), kind
        if kind in ("hidden", "first", "last"):
            assert (((rows >= 16) & (rows < 32)).sum(1) == NEEDLES + 1).all()
    assert all((hidden(Draw(0), np.full(9, p), 16, 4)[0][:, 0] == p).all() for p in range(14))


def test_places_and_needles_are_uniform() -> None:
    """Within four standard errors of the expected counts, everywhere."""
    rows, cells = 20_000, LENGTH - 2
    anywhere = Draw(2).below(cells, rows)
    others = hidden(Draw(5), np.full(rows, 30), LENGTH, NEEDLES)[0][:, 1:-1]
    trained, which = recurring(Draw(6), rows, LENGTH, NEEDLES)
    for places, possible in (
        (anywhere, range(cells)),
        (others, [p for p in range(0, cells, 2) if p != 30]),
        (trained[:, :-1], range(cells)),
    ):
        counts = np.bincount(places.ravel(), minlength=cells)
        assert counts.sum() == counts[list(possible)].sum()
        mean = counts.sum() / len(possible)
        assert (abs(counts[list(possible)] - mean) < 4 * np.sqrt(mean)).all()
    assert set(which.max(1)) == {0, 1, 2, 3}


def test_rows_are_a_function_of_the_seed() -> None:
    hay, layout = Haystack(16, 16, 16), layouts()["hidden"]
    one, same, other = (
        hay.rows(Draw(*seed), "train", layout, NEEDLES)["tokens"] for seed in ((1, 2), (1, 2), (1, 3))
    )
    assert (one == same).all()
    assert not (one == other).all()
    assert hay.manifest == Haystack(16, 16, 16).manifest
    assert hay.manifest != Haystack(17, 16, 16).manifest
