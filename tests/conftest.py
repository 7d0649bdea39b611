import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import torch

import tempered  # noqa: F401  (registers a mixer before tests are collected)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
