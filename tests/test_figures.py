"""The charts: honest about what is missing or far away, and the same bytes every time."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from langevin import figures
from langevin.errors import UsageError
from langevin.figures import Grid, Line, Mark

LINES = [
    Line("a", 0, [1, 2, 3], [3.0, 2.0, 1.0], [None, (1.9, 2.1), None], pale=[([1, 3], [3.1, 1.1])]),
    Line("b", 1, [1, 2, 3], [2.0, 1.5, 0.9]),
]
EFFECTS = [
    Mark("near", 1, -0.01, x_ends=(-0.02, 0.0), shown="−0.01"),
    Mark("reference", 0, 0.0, shown="reference"),
    Mark("far", 2, 0.5, x_ends=(0.4, 0.6), shown="+0.5", sure=True),
    Mark("lost", 3, math.nan, shown="diverged on 2 of 8"),
]
DRAWN = {
    "forest": lambda: figures.forest(EFFECTS, "difference"),
    "scatter": lambda: figures.scatter(EFFECTS[:3], ("cost", "loss")),
    "curves": lambda: figures.curves(LINES, ("tokens", "loss"), level=1.2, start=0.2),
    "log curves": lambda: figures.curves(LINES, ("length", "time"), log="xy"),
    "reliability": lambda: figures.reliability([Line("a", 0, [0.1, 0.9], [0.2, 0.8])], [[10, 20]]),
    "scalars": lambda: figures.scalars([Line("a", 0, [0, 0, 1], [1.0, 2.0, 3.0])], "t"),
    "heatmap": lambda: figures.heatmap(
        [Grid([[0.1, 0.2], [0.3, 0.4]], ["0", "1"], ["a", "b"])], ("key", "query"), "weight"
    ),
}


def texts(svg: str) -> list[str]:
    return [
        "".join(text.itertext()) for text in ElementTree.fromstring(named(svg)).iter() if text.tag == "text"
    ]


def named(svg: str) -> str:
    return svg.replace("<svg ", '<svg xmlns:xlink="http://www.w3.org/1999/xlink" ', 1)


@pytest.mark.parametrize("kind", DRAWN)
def test_a_drawing_for_a_page_is_small_labelled_and_the_same_every_time(kind):
    first, second = (figures.svg(DRAWN[kind](), kind) for _ in range(2))
    assert first == second
    assert len(first) < 20_000
    assert 'class="axis-label x"' in first
    assert "font-family" not in first
    assert "<style" not in first
    assert set(re.findall("#[0-9a-f]{6}", first)) & set(figures.VARIABLES) == set()
    assert texts(first)


def test_what_one_drawing_refers_to_is_not_in_another():
    ids = [
        set(re.findall(r' id="([^"]+)"', figures.svg(DRAWN["curves"](), key))) for key in ("one", "other")
    ]
    assert ids[0]
    assert not ids[0] & ids[1]


def test_a_forest_shows_every_row_and_an_effect_far_away_as_an_arrow():
    figure = DRAWN["forest"]()
    (axes,) = figure.axes
    assert axes.get_xlim()[1] < 0.1
    assert ">" in [line.get_marker() for line in axes.lines]
    assert {"near", "far", "lost", "diverged on 2 of 8"} <= set(texts(figures.svg(figure, "f")))


def test_a_sure_effect_is_filled_and_others_are_open():
    axes = DRAWN["forest"]().axes[0]
    fills = {
        line.get_marker(): line.get_markerfacecolor() for line in axes.lines if line.get_markersize() == 6
    }
    assert fills[">"] == figures.COLOURS[2]
    assert fills["s"] == figures.PAGE


def test_names_in_a_scatter_never_lie_over_each_other_or_a_point():
    crowd = [Mark(f"arm number {i}", i, 1 + i / 100, 1.0, (0.9, 1.2), (0.95, 1.05)) for i in range(8)]
    shown = texts(figures.svg(figures.scatter(crowd, ("cost", "loss")), "s"))
    assert sum(name.startswith("arm") for name in shown) < 8


def test_the_start_of_training_may_lie_above_the_frame():
    line = Line("a", 0, [*range(11)], [50.0, 2, 1.9, 1.8, 1.7, 1.6, 1.5, 1.4, 1.3, 1.2, 1.1])
    assert figures.curves([line], ("x", "y"), start=0.2).axes[0].get_ylim()[1] < 3
    assert figures.curves([line], ("x", "y")).axes[0].get_ylim()[1] > 50


def test_a_short_line_is_not_left_above_the_frame_by_a_long_one():
    long, short = Line("a", 0, [*range(11)], [9.0, 2, *[1.0] * 9]), Line("b", 1, [0, 1], [9.0, 5.0])
    low, high = figures.curves([long, short], ("x", "y"), start=0.2).axes[0].get_ylim()
    assert low < 1 < 5 < high < 9


def test_names_of_columns_stand_upright_where_there_is_no_room_for_them():
    def turned(names):
        grid = Grid([[0.1] * len(names)] * len(names), names, names)
        return (
            figures.heatmap([grid, grid], ("key", "query"), "w").axes[0].get_xticklabels()[0].get_rotation()
        )

    assert turned(["Once", "upon", "a", "time", "there", "was", "a", "cat"]) == 90
    assert turned(["0", "0.25", "0.5", "0.75", "1"]) == 0


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (-0.05, "−0.05"),
        (9999, "9999"),
        (16_384, "16,384"),
        (250_000, "250 k"),
        (2e6, "2 M"),
        (5e13, "50 T"),
    ],
)
def test_ticks_are_short(value, shown):
    assert figures._tick(value) == shown


def test_a_picture_that_stands_alone_has_a_legend_and_a_known_format(tmp_path):
    for suffix in figures.FORMATS:
        figures.save(DRAWN["curves"](), tmp_path / "new" / f"picture{suffix}")
        assert (tmp_path / "new" / f"picture{suffix}").stat().st_size > 2000
    with pytest.raises(UsageError, match="is no picture"):
        figures.save(DRAWN["curves"](), tmp_path / "picture.bmp")


def test_no_two_of_many_arms_look_the_same():
    assert len({figures.look(i) for i in range(64)}) == 64


def test_a_note_is_broken_before_the_edge_of_its_picture(tmp_path):
    figure = DRAWN["curves"]()
    note = "Strong: mean over seeds; pale: each seed. The start may lie above the frame."
    figures.save(figure, tmp_path / "p.png", note)
    figure.set_dpi(200)  # as it was saved: letters are wider there
    figure.draw_without_rendering()
    assert figure.legends[0].get_window_extent().x1 <= figure.bbox.x1
