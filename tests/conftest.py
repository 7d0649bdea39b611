import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)  # the tensors are tiny: two threads would mostly wait for each other

import tempered  # noqa: E402, F401  (registers a mixer before tests are collected)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
