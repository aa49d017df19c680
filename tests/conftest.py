"""Every test starts from the same seed, on one thread, in no terminal."""

import random

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def _same_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # which workers of pytest-xdist may have set
    monkeypatch.delenv("LINES", raising=False)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
