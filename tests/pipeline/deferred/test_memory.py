"""A deferred model takes the memory of its tensors once: nothing is whole in two places."""

import pytest

from tests.support.processes import run_script

_SCRIPT = """
import resource
import torch
from torch import nn
from pipepart import Pipeline, deferred_init
from tests.support.chains import plan_by_hand

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

class Block(nn.Linear):
    def reset_parameters(self):
        super().reset_parameters()
        nn.init.normal_(self.weight)

def make():
    return nn.Sequential(*[Block(1024, 1024) for _ in range(48)])  # 192 MiB, 4 MiB a layer

with deferred_init():
    model = make()
plan = plan_by_hand([str(i) for i in range(48)], [12, 24, 36], micro_batches=2)
torch.randn(64, 64) @ torch.randn(64, 64)
before = peak()
with Pipeline(model, plan, nn.functional.mse_loss):
    print(peak() - before)
"""


@pytest.mark.slow
def test_peak_memory_is_that_of_the_model():
    ended = run_script(_SCRIPT)
    assert ended.returncode == 0, ended.stderr
    assert 190 < float(ended.stdout) < 220, ended.stdout
