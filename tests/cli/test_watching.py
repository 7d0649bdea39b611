"""`langevin generate --watch` and `--html`: texts of a masked model appear, and a page plays them."""

import json
from pathlib import Path

import pytest

import langevin
from langevin import cli
from langevin.settings import TrainConfig

TINY = {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch": 4, "steps": 2, "device": "cpu"}


@pytest.fixture(scope="module", params=["masked", "ar"])
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / request.param
    langevin.train(TrainConfig(data="stories", objective=request.param, **TINY), folder, quiet=True)
    return folder


def test_a_text_is_watched_and_a_page_plays_all_of_them(run: Path, tmp_path: Path, capsys) -> None:
    page = tmp_path / "play.html"
    command = ["generate", str(run), "--samples", "2", "--watch", "--html", str(page), "--device", "cpu"]
    if run.name == "ar":
        assert cli.main(command) == 2
        assert "appear word by word" in capsys.readouterr().err
        return
    assert cli.main(command) == 0
    shown = capsys.readouterr()
    assert shown.out.count("--- ''") == 2  # where no terminal can show one appear
    assert str(page) in shown.err.replace("\n", "")
    assert "<script" in page.read_text()
    assert cli.main([*command, "--json"]) == 2
    assert "--watch and --json" in capsys.readouterr().err
    assert cli.main(["generate", str(run), "--html", str(tmp_path / "no" / "x.html")]) == 2
    assert cli.main(["generate", str(run), "--html", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
    assert cli.main(["generate", str(run), "--order", "foo"]) == 2
    assert f"See langevin generate {run} --help." in capsys.readouterr().err
    assert cli.main(["generate", str(run), "--seed", "-1"]) == 2
    stopped = ["generate", str(run), "--stop", "e", "--html", str(page), "--device", "cpu"]
    assert cli.main(stopped) == 0
    assert capsys.readouterr().out.strip().endswith("e")
    plain = ["generate", str(run), "--json", "--seed", "3", "--device", "cpu"]
    assert cli.main(plain) == 0
    (text,) = json.loads(capsys.readouterr().out)
    assert text["text"]
