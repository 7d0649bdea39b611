"""A small classifier of three classes, and what it is exported as."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import Any

import pytest

import langevin
from langevin.export import to_onnx
from langevin.settings import TrainConfig

WORDS = {"good": ["fine", "warm"], "bad": ["dull", "cold"], "odd": ["blue", "square"]}


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, draw = tmp_path_factory.mktemp("data") / "films.csv", random.Random(0)
    with open(path, "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["review", "stars"])
        for i in range(300):
            label = draw.choice(list(WORDS))
            others = [draw.choice(["a", "film", "of", "it"]) for _ in range(draw.randrange(30))]
            rows.writerow([f"{i} {' '.join(others)} {draw.choice(WORDS[label])}", label])
    return path


@pytest.fixture(scope="session")
def run(table: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    config = TrainConfig(
        task="classify(text_column='review', label_column='stars')",
        data=str(table),
        tokenizer="words",
        mixer="neighbor(kind='content', hops='dilated', mean=True)",
        layers=1,
        width=64,
        heads=2,
        context=64,
        batch=16,
        epochs=20,
        lr=1e-2,
        device="cpu",
    )
    return langevin.train(config, tmp_path_factory.mktemp("runs") / "run", quiet=True)[0]


@pytest.fixture(scope="session")
def exported(run: Any) -> tuple[Path, list[dict[str, Any]]]:
    out = run.path / "export"
    return out, to_onnx.export(run, out, int8=True)
