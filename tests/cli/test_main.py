"""The command line as a user meets it: in a process of its own."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from langevin import cli


def langevin(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "langevin", *arguments], capture_output=True, text=True, **options
    )


def test_help_answers_in_half_a_second_without_torch():
    times = []
    for _ in range(4):  # the first warms the file cache; of the processor: a machine may be busy
        before = os.times()
        done = langevin("--help")
        after = os.times()
        times.append(sum(after[2:4]) - sum(before[2:4]))  # of children
    assert 0 < min(times) < 0.5
    assert done.returncode == 0
    for command in ("list", "check", "bench", "convert", "doctor"):
        assert command in done.stdout


def test_importing_langevin_does_not_import_torch():
    code = "import sys, langevin, langevin.cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_text_that_a_terminal_has_no_letters_for_is_no_error(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys.modules["langevin.cli.main"], "_parse", lambda _: lambda: print("é") or 0)
    assert cli.main(["list"]) == 0
    out.flush()
    assert out.buffer.getvalue() == b"\\xe9\n"


def test_no_command_is_help_and_version_is_known():
    assert "check" in langevin().stdout
    assert langevin("--version").stdout.startswith("langevin 0.")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "hear"], "Did you mean 'heat'"),
        (["check", "heat(tt=1)"], "Did you mean 't'"),
        (["check", "heat(t=-0.1)"], "heat(t=-0.1) must be positive"),
        (["check", "missing.py:Mixer"], "no such file: missing.py"),
        (["check", "softmax", "--only", "speed"], "unknown property 'speed'"),
        (["bench", "mixers", "--heads", "7"], "7 heads do not divide a width of 256"),
        (["bench", "mixers", "softmacs"], "Did you mean 'softmax'"),
        (["bench", "mixers", "--json", "nowhere/x.json"], "no such folder: nowhere"),
        (
            ["train", "--layers", "x"],
            "invalid literal for int() with base 10: 'x'\nSee langevin train --help.",
        ),
        (["train", "--laters", "3"], "langevin: Unrecognized options: --laters, 3\nDid you mean --layers?"),
        (["convert", "no/such/model", "softmax", "--out", "x"], "no/such/model"),
        (["convert", ".", "hear", "--out", "y"], "Did you mean 'heat'"),
    ],
)
def test_a_wrong_command_is_one_line_of_cause_and_one_of_remedy(arguments, said, capsys):
    assert cli.main(arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert said in "\n".join(lines)
    assert lines[0].startswith("langevin: ")
    assert len(lines) <= 2


def test_an_unknown_command_exits_with_2():
    assert langevin("chek").returncode == 2


def test_a_debug_flag_gives_the_traceback():
    done = langevin("check", "hear", "--debug")
    assert "Traceback" in done.stderr


def test_check_prints_a_table_and_exits_with_0(capsys):
    assert cli.main(["check", "ssmax", "--only", "gradients", "padding"]) == 0
    out = capsys.readouterr().out
    assert "gradients" in out
    assert "pass" in out


def test_check_names_the_failure_and_exits_with_1(capsys):
    target = f"{Path(__file__).parents[1] / 'checks' / 'planted.py'}:CircularNeighbours"
    assert cli.main(["check", target, "--only", "no future leak", "--json"]) == 1
    (report,) = json.loads(capsys.readouterr().out)
    assert report["passed"] is False
    assert report["rows"][0]["property"] == "no future leak"
    assert "position 0" in report["rows"][0]["detail"]


def test_a_registered_mixer_is_listed_checked_and_measured(capsys, tmp_path):
    assert cli.main(["list", "mixers", "--json"]) == 0
    assert "tempered" in [row["name"] for row in json.loads(capsys.readouterr().out)]
    assert cli.main(["check", "tempered(power=0.5)"]) == 0
    result = tmp_path / "bench.json"
    arguments = ["--lengths", "32", "--tokens", "64", "--width", "16", "--heads", "2"]
    arguments += ["--repeats", "2", "--json", str(result)]
    assert cli.main(["bench", "mixers", "tempered", *arguments]) == 0
    rows = json.loads(result.read_text())["rows"]
    assert {(row["mixer"], row["part"]) for row in rows} == {
        (mixer, part) for mixer in ("softmax", "tempered") for part in ("module", "core")
    }


def test_lists_of_wrappers_and_aliases(capsys):
    assert cli.main(["list", "wrappers", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["drift", "noise"]
    assert cli.main(["list", "aliases"]) == 0
    assert "diffusion_fixed" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "name"), [("objectives", "ar"), ("tasks", "lm"), ("data", "stories")])
def test_lists_of_what_can_be_chosen(kind, name, capsys):
    assert cli.main(["list", kind, "--json"]) == 0
    assert name in [row["name"] for row in json.loads(capsys.readouterr().out)]
    assert cli.main(["list", kind]) == 0
    assert name in capsys.readouterr().out
