"""Every test starts from the same seed, on one thread."""

import random

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def _same_start():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
