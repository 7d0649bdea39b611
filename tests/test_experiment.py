"""run_experiment: the one call of attention-free-diffusion, on our own harness."""

from __future__ import annotations

from pathlib import Path

import pytest

import langevin
from langevin.errors import UsageError

SMALL = {"embed_dim": 16, "max_length": 16, "batch_size": 8, "epochs": 2, "device": "cpu", "quiet": True}


@pytest.fixture
def listops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder laid out as that of the Long Range Arena."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "lra"
    folder.mkdir()
    for split, count in (("train", 60), ("val", 20), ("test", 20)):
        rows = "".join(f"( ( [MAX {i % 10} {split} ) ] )\t{i % 10}\n" for i in range(count))
        (folder / f"basic_{split}.tsv").write_text(f"Source\tTarget\n{rows}")
    return folder


def test_the_call_of_the_readme_gives_results_a_model_and_a_folder(listops: Path) -> None:
    results, model, log_dir = langevin.run_experiment(
        dataset_name="lra_listops", data_dir=listops, experiment_name="listops_baseline", **SMALL
    )
    assert log_dir == Path("runs/listops_baseline")
    assert 0 <= results["accuracy"] <= 1
    assert results["nll"] > 0
    run = langevin.load(log_dir)
    assert run.config.mixer == "neighbor(iters=4, alpha=0.5)"
    assert (run.config.lr, run.config.schedule, run.config.weight_decay) == (5e-5, "constant", 0.01)
    assert run.config.epochs == 2
    assert model.config.num_labels == 10
    assert (log_dir / "evaluation-test.json").is_file()


def test_the_columns_of_a_table_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))
    path, named = tmp_path / "my.csv", {"text_column": "review", "label_column": "stars"}
    path.write_text("review,stars\n" + "".join(f"text {i},{i % 3}\n" for i in range(60)))
    _, model, log_dir = langevin.run_experiment(str(path), **named, **SMALL, out=tmp_path / "run")
    assert model.config.num_labels == 3
    assert langevin.load(log_dir).task.text_column == "review"


def test_what_it_is_told_goes_first_and_a_wrong_word_is_refused(listops: Path) -> None:
    told = {"dataset_name": "lra_listops", "data_dir": listops, **SMALL}
    _, model, log_dir = langevin.run_experiment(
        **told, num_iters=2, alpha=0.7, steps=3, seed=4, layers=2, out="elsewhere"
    )
    assert log_dir == Path("elsewhere")
    config = langevin.load(log_dir).config
    assert (config.seed, config.steps, config.epochs, config.layers) == (4, 3, None, 2)
    assert model.config.mixer == "neighbor(iters=2, alpha=0.7)"
    with pytest.raises(UsageError, match="labelled data 'imbd'"):
        langevin.run_experiment("imbd", **SMALL)
    with pytest.raises(UsageError, match="alpha=2"):
        langevin.run_experiment(**told, alpha=2)
