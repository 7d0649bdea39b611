"""Three hundred command lines that nobody would write end with 0, 1 or 2, and say why in two lines."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import get_args

import pytest

from langevin import cli
from langevin.cli.main import COMMANDS
from langevin.cli.main import command as known_command
from langevin.cli.runs import Picture
from langevin.runs import train
from langevin.settings import GROUPS, StudySettings
from training.small_run import small

COUNT = 300
ODD = (
    *("", " ", "-1", "0", "1", "2", "3.5", "nan", "inf", "1e999", "-0", "1e-40", "99999999999999999999"),
    *(
        "é",
        "a b",
        "None",
        "[",
        "--",
        "-",
        "=",
        "../..",
        "/dev/null",
        "\x00",
        "x" * 300,
        "{}",
        "'",
        "\\",
        "%s",
    ),
    *(
        "softmax",
        "heat(t=",
        "heat(t=0.3, t=0.4)",
        "ssmax;sima",
        "lm",
        "ar",
        "cpu",
        "meta",
        "cuda:7",
        "auto",
    ),
    *("best", "last", "bytes", "bpe-99999999999999999999", "bpe-4000000000", "0-99999999999", "0,0", "no"),
)
# What a command needs so that, where the rest is right, it ends within a second.
TINY = {
    **{"layers": "1", "width": "16", "heads": "2", "context": "16", "batch": "4", "steps": "1"},
    **{"eval-tokens": "64", "compile": "off", "device": "cpu", "tokenizer": "bytes"},
}
SLOW = {
    "minutes",
    "tokens",
    "steps",
    "compile",
    "repeats",
    "init",
    "trials",
    "seeds",
    "workers",
    "on",
    "open",
}
ARMS = [
    *("ssmax", "softmax", "x=sima", "heat(t=-1)", "", "a=b=c", "x=ssmax, lr=1e-2", "x=ssmax, lr=fast"),
    *(
        '"heat(t=1)"=ssmax, tie=false',
        "x=ssmax, objective=nosuch",
        "x=ssmax, steps=-1",
        "report.html=sima",
        ",",
    ),
]
FORMS = {
    "train": TINY,
    "compare": {**TINY, "seeds": "0", "workers": "0", "test-tokens": "64"},
    "bench": {"lengths": "8", "width": "16", "heads": "2", "repeats": "1", "tokens": "16"},
    "check": {"only": "gradients"},
    "generate": {"tokens": "3"},
}


def flags_of(name: str) -> list[str]:
    own = [f.name for f in dataclasses.fields(known_command(name))]
    if name in ("train", "compare"):
        groups = {**GROUPS, "study": StudySettings} if name == "compare" else GROUPS
        own = [n for n in own if n not in groups]
        own += [f.name for g in groups.values() for f in dataclasses.fields(g)]
    return [n.replace("_", "-") for n in own if n not in SLOW]


def command(draw: random.Random, run: Path, text: Path, out: Path) -> list[str]:
    name = draw.choice([*COMMANDS, "train", "train", "generate", "evaluate", "nonsense"])
    values = dict(FORMS.get(name, {}))
    if name in ("train", "compare"):
        values |= {"data": str(text), "out": str(out)}
    known = flags_of(name) if name in COMMANDS else []
    for flag in draw.sample(known, min(len(known), draw.randint(0, 2))):
        values[flag] = draw.choice(ODD)
    if draw.random() < 0.1:
        values[draw.choice(["nosuch", "layer", "dat"])] = draw.choice(ODD)
    first = {
        "evaluate": [str(run)],
        "generate": [str(run)],
        "plot": [draw.choice([*get_args(Picture), "x"]), str(run)],
        "report": [str(run)],
        "compare": ["softmax", draw.choice(ARMS)],
        "convert": [draw.choice(["nosuch", str(run / "model"), "a/b/c"]), draw.choice(["ssmax", "x"])],
        "bench": [draw.choice(["mixers", "train", "z"]), "ssmax"],
        "check": [draw.choice(["ssmax", "nosuch", "x.py:Y", str(text)])],
        "data": [draw.choice(["list", "prepare"]), draw.choice(["", str(text), "nosuch"])],
        "reproduce": [draw.choice(["nosuch", ""])],
        "list": [draw.choice(["mixers", "tasks", "x"])],
    }.get(name, [])
    if draw.random() < 0.1 and first:
        first[draw.randrange(len(first))] = draw.choice(ODD)
    if name == "convert":
        values.setdefault("out", str(out))
    words = [name, *first]
    for flag, value in values.items():
        words += [f"--{flag}={value}"] if draw.random() < 0.3 else [f"--{flag}", value]
    return words


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    return train(small(folder, steps=4, eval_every=4), folder / "run", quiet=True)[0].path


@pytest.mark.parametrize("part", range(10))
def test_no_command_line_gives_a_traceback(
    part: int,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    draw, text = random.Random(part), run.parent / "text.txt"
    for number in range(COUNT // 10):
        words = command(draw, run, text, tmp_path / f"out-{number}")
        try:
            status = cli.main(list(words))
        except SystemExit as stop:  # help was asked for
            status = int(stop.code or 0)
        said = capsys.readouterr().err
        assert status in (0, 1, 2), words
        assert "Traceback" not in said, words
        assert "not foreseen" not in said, (words, said)
        if status == 2:
            told = [line for line in said.splitlines() if not line.startswith("langevin: warning")]
            assert told[0].startswith("langevin: "), (words, said)
            assert len(told) <= 2, (words, said)
