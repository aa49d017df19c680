"""A rank that raises or is killed while others wait for it within a stage ends all of them at once."""

from __future__ import annotations

import re

import pytest

from tests.support.processes import others_of, run_ranks

pytestmark = pytest.mark.slow

# Two steps, then a third in which rank 1 does EVIL at PLACE. Each rank prints what it raises.
_SCRIPT = """
import os, signal
import torch, torch.distributed as dist
from torch import nn
import pipepart
from tests.support.chains import plan_by_hand
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
now = ""

def at(place):
    if (dist.get_rank(), place) == (1, now):
        {evil}

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        at("forward")
        y = self.down(self.up(x).tanh())
        if y.requires_grad:
            y.register_hook(lambda gradient: at("backward"))
        return y

def parallelize(layers, mesh):
    at("parallelize")
    for layer in layers.values():
        if "tp" in mesh.mesh_dim_names:
            parallelize_module(layer, mesh["tp"], {{"up": ColwiseParallel(), "down": RowwiseParallel()}})
        else:
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward={reshards})

torch.manual_seed(0)
model = nn.Sequential(*(Layer() for _ in range(4)))
plan = plan_by_hand(list("0123"), [2], micro_batches=4, schedule="zb-h1", replicas={replicas}, tensor={tensor})
x = torch.ones(8, 8)
try:
    now = {place!r} if {place!r} == "parallelize" else ""
    pipe = pipepart.Pipeline(model, plan, loss_fn=nn.MSELoss(), parallelize=parallelize)
    for call in range(3):
        now = {place!r} if call == 2 else ""
        pipe.step(x, target=x)
        at("script")
        pipe.full_state_dict()
except BaseException as error:
    print(type(error).__name__, str(error), flush=True)
    raise
"""
_KILL, _RAISE = "os.kill(os.getpid(), signal.SIGKILL)", "raise ValueError('out of ideas')"
_STAGE = {1: "stage 0 of 2 ", 2: "stage 1 of 2 of copy 0 "}  # of rank 1, by the number of replicas


@pytest.mark.parametrize("evil", [_KILL, _RAISE], ids=["killed", "raises"])
@pytest.mark.parametrize("place", ["parallelize", "forward", "backward", "script"])
@pytest.mark.parametrize(("replicas", "tensor", "reshards"), [(1, 2, False), (2, 1, False), (2, 1, True)])
def test_all_ranks_hear_of_it(replicas: int, tensor: int, reshards: bool, place: str, evil: str):
    script = _SCRIPT.format(evil=evil, place=place, replicas=replicas, tensor=tensor, reshards=reshards)
    says = "is lost" if evil is _KILL else "failed: ValueError: out of ideas"
    if (evil, place) == (_RAISE, "script"):
        says = "takes no part in this call: its script has ended with ValueError"
    for text in others_of(run_ranks(script, 4), 1):
        assert f"RankError rank 1 {says}" in text
        if evil is _RAISE and place in ("forward", "backward"):
            assert re.search(_STAGE[replicas] + "on virtual:., micro-batch 0 of 4", text), text
