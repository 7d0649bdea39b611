"""`langevin plot`: what is drawn of runs and benchmarks is what was measured, and says what it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import langevin
from langevin import cli, figures
from langevin.cli import pictures

NEEDLE = "--task needle --layers 2 --width 16 --heads 2 --context 16 --needles 2 --steps 2 --rows 4"
NEEDLE += " --lengths 16,32 --depths 0,0.5,1 --device cpu"
MIXERS = {"sima": "neighbor(iters=1); sima", "sigmoid": "neighbor(iters=1); sigmoid"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs that look for needles, evaluated."""
    made = []
    for name, mixer in MIXERS.items():
        made.append(tmp_path_factory.mktemp("runs") / name)
        out = ["--mixer", mixer, "--out", str(made[-1])]
        assert cli.main(["train", *NEEDLE.split(), *out]) == 0
        assert cli.main(["evaluate", str(made[-1]), "--device", "cpu"]) == 0
    return made


def cells(run: Path, by: str) -> dict[tuple[Any, Any], float]:
    rows = langevin.load(run).evaluation("test")["rows"]
    return {tuple(r["at"].values()): r["value"] for r in rows if [*r["at"]] == ["length", by]}


def panels(figure: Any) -> list[Any]:
    """Those that hold a grid, without the bars of colours."""
    return [axes for axes in figure.axes if axes.get_title(loc="left")]


@pytest.mark.parametrize("by", ["depth", "position", "distance"])
def test_needles_of_several_runs_stand_side_by_side_in_the_same_colours(runs, by):
    (drawn,) = pictures.needle(runs, "test", "", by)
    shown = panels(drawn.figure)
    for run, axes, mixer, label in zip(runs, shown, MIXERS.values(), ("length (tokens)", ""), strict=True):
        grid, found = np.ma.filled(axes.collections[0].get_array(), np.nan), cells(run, by)
        columns = sorted({place for _, place in found})
        for i, length in enumerate((16, 32)):
            wanted = [found.get((length, place), np.nan) for place in columns]
            np.testing.assert_array_equal(grid[i], wanted)
        assert [float(tick.get_text()) for tick in axes.get_xticklabels()] == columns
        assert axes.get_title(loc="left") == f"{mixer}\n{label}"  # rows are named once, at the left
        assert any(tick.get_text() for tick in axes.get_yticklabels()) == bool(label)
        assert axes.collections[0].get_clim() == (0, 1)
    assert len(drawn.figure.axes) == len(shown) + 1
    assert drawn.figure.axes[-1].get_ylabel() == "retrieval accuracy (fraction)"


def test_over_one_place_there_are_lines_with_intervals_and_the_length_of_training(runs):
    (drawn,) = pictures.lengths(runs, "test", "answers_of_other_keys", "")
    rows = langevin.load(runs[0]).evaluation("test")["rows"]
    own = [r for r in rows if r["metric"] == "answers_of_other_keys" and r["at"]]
    assert drawn.lines[0].y == [row["value"] for row in own]
    assert drawn.lines[0].ends == [(row["low"], row["high"]) for row in own]
    assert "Dotted: the length of training, 16." in drawn.note


@pytest.mark.parametrize(("which", "said"), [(0, "negative ones are blue"), (1, "not to 1")])
def test_attention_is_that_of_the_forward_pass_and_says_where_weights_are_no_shares(runs, which, said):
    (drawn,) = pictures.attention(runs[which : which + 1], None, None, 1, 1)
    (axes,) = panels(drawn.figure)
    model = langevin.load(runs[which]).model
    kept: list[torch.Tensor] = []
    mixer = model.base_model.blocks[1].attention
    mixer.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    run = langevin.load(runs[which])
    row = run.task.held_out(run.task.prepare(run.config), run.config)[0]["tokens"][:1, :16]
    with torch.no_grad():
        model(torch.from_numpy(row), use_cache=False)
        wanted = mixer(kept[0], return_weights=True)[1][0, 1]
    np.testing.assert_allclose(axes.collections[0].get_array(), wanted, atol=1e-6)
    assert said in axes.get_title(loc="left").replace("\n", " ")
    low, high = axes.collections[0].get_clim()
    assert (low == -high) == (which == 0)


def test_runs_of_one_mixer_are_named_by_their_folders(runs, tmp_path):
    shutil.copytree(runs[0], tmp_path / "again")
    (drawn,) = pictures.attention([runs[0], tmp_path / "again"], None, None, 1, 0)
    names = [axes.get_title(loc="left").replace("\n", " ") for axes in panels(drawn.figure)]
    assert [f"({path})" in name for path, name in zip(("sima", "again"), names, strict=True)] == [
        True,
        True,
    ]


def test_weights_that_are_shares_of_a_whole_say_nothing_more():
    assert pictures._sums(torch.tensor([[1.0, 0.0], [0.25, 0.75]])) == ""
    assert pictures._sums(torch.tensor([[-0.5, 0.0], [0.25, 2.0]])).startswith("; rows sum to −0.5 … 2.2")


def test_learning_curves_of_runs_show_training_pale(runs):
    (drawn,) = pictures.curves(runs)
    assert [line.name for line in drawn.lines] == list(MIXERS.values())
    run = langevin.load(runs[0])
    assert drawn.lines[0].y == [row["loss"] for row in run.metrics("valid")]
    assert list(drawn.lines[0].pale[0][1]) == [row["loss"] for row in run.metrics("train")]
    assert "pale: training" in drawn.note


def test_times_by_length_are_drawn_for_each_part_of_a_benchmark(tmp_path, capsys):
    rows = [
        {"mixer": m, "part": part, "length": n, "batch": 1, "both_ratio": r, "both_ms": 2 * r}
        for part in ("module", "core")
        for m, r in (("softmax", 1.0), ("sima", 0.5))
        for n in (64, 128)
    ]
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({"rows": rows}))
    module, core = pictures.bench([file], "")
    assert [(line.name, [*line.x], [*line.y]) for line in core.lines] == [
        ("softmax", [64, 128], [1.0, 1.0]),
        ("sima", [64, 128], [0.5, 0.5]),
    ]
    assert (
        module.figure.axes[0].get_title(loc="left") == "module: forward and backward (× softmax), log scale"
    )
    assert (
        cli.main(["plot", "bench", str(file), "--metric", "both_ms", "--out", str(tmp_path / "b.svg")]) == 0
    )
    assert [Path(line).name for line in capsys.readouterr().out.split()] == ["b-module.svg", "b-core.svg"]
    assert cli.main(["plot", "bench", str(file), "--metric", "both_ms"]) == 0  # not over those of another
    assert capsys.readouterr().out.split()[0].endswith("bench-both_ms-module.png")


def test_several_sizes_of_batch_are_lines_of_their_own():
    rows = [{"model": "a", "length": n, "batch": b, "ms": n * b} for b in (1, 4) for n in (64, 32)]
    lines, _ = figures.by_length(rows, "model", "ms", "time")
    assert [(line.name, [*line.y]) for line in lines] == [
        ("a, 1 at a time", [32, 64]),
        ("a, 4 at a time", [128, 256]),
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("lengths RUN --by state", "has no accuracy by state\nIt has --metric accuracy --by length"),
        ("reliability RUN", "has no calibration\nGive runs of lm"),
        ("times RUN", "these runs learn no scalars\nTry ssmax"),
        ("attention RUN --layer 2", "has 2 layers of 2 heads, not layer 2, head 0\nBoth count from 0"),
        ("attention RUN --layer 0", "neighbor has no attention weights\nIt mixes neighbours"),
        ("attention RUN --layer 1 --text hello", "reads no text, but tokens of its task\nLeave --text out"),
        ("curves RUN --layer 1", "curves takes no --layer\nIt takes no other options"),
        ("needle RUN --split valid --by nothing", "has no accuracy by nothing"),
        ("needle FOLDER", "is not a run folder\nGive a folder made by langevin train"),
        ("bench FOLDER", "results.json\nGive what langevin bench mixers --json"),
        ("needle", "no folder came"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_a_cause_and_a_remedy(runs, tmp_path, capsys, arguments, said):
    words = arguments.replace("RUN", str(runs[0])).replace("FOLDER", str(tmp_path))
    assert cli.main(["plot", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_attention_over_images_and_over_texts_is_drawn_apart(runs, tmp_path, capsys):
    small = "--task images --layers 2 --width 16 --heads 2 --steps 0 --device cpu --out"
    pooled = ["--objective", "classify(pooling='class')"]
    assert cli.main(["train", *small.split(), str(tmp_path / "digits")]) == 0
    assert cli.main(["train", *small.split(), str(tmp_path / "of-class"), *pooled]) == 0
    (drawn,) = pictures.attention([tmp_path / "digits", tmp_path / "of-class"], None, None, 1, 0)
    names = [axes.get_title(loc="left").replace("\n", " ") for axes in panels(drawn.figure)]
    assert names[0].endswith("what patches get of all, on average")
    assert names[1].endswith("what patches get of the class token")
    capsys.readouterr()
    for one, other in ((runs[0], tmp_path / "digits"), (tmp_path / "digits", runs[0])):
        assert cli.main(["plot", "attention", str(one), str(other), "--layer", "1"]) == 2
        assert (
            "some of these runs read images and some texts\nDraw them one by one" in capsys.readouterr().err
        )
