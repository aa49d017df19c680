"""A measured profile has the overhead of the runtime."""

import torch
from torch import nn

import pipepart
from pipepart.measure import RUNTIME


def test_a_measured_profile_has_it():
    found = pipepart.profile(nn.Sequential(nn.Linear(4, 4)), torch.randn(8, 4), seconds=0, devices=1).overhead
    assert {name: getattr(found, name) for name in RUNTIME} == RUNTIME
