"""A rank that ends before all have made the pipeline ends the others at once, with its name."""

import re

import pytest

from tests.support.rank_scripts import run_ranks

# Rank BAD does EVIL where {place} is now. The process group is made by the script, or by the pipeline.
_SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed
from torch import nn
import pipepart
import pipepart.cluster.processes

def at(place):
    if place == {place!r} and rank == {bad}:
        print("fails at", time.time(), flush=True)
        {evil}

def loss_fn(output, target):
    at("profile")
    return nn.functional.mse_loss(output, target)

def optimizer(parameters):
    at("making")
    return torch.optim.SGD(parameters, lr=0.1)

rank = int(os.environ["RANK"])
{start}
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
x = torch.ones(8, 4)
measured = pipepart.cluster.processes._measured
pipepart.cluster.processes._measured = lambda *given: (at("links"), measured(*given))[1]
at("script")
cluster = pipepart.Cluster.of_ranks()
at("cluster")
options = dict(reduction="mean", seconds=0.1, optimizer=optimizer)
with pipepart.Pipeline.auto(model, x, target=x, loss_fn=loss_fn, devices=cluster, **options) as pipe:
    pipe.step(x, target=x)
"""
_OWN_GROUP = 'torch.distributed.init_process_group("gloo")'
_GROUP_OF_PIPELINE = 'os.environ["TORCHELASTIC_RUN_ID"] = "tests"'
_KILL = "os.kill(os.getpid(), signal.SIGKILL)"
_RAISE = "raise OSError('no such file')"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "bad", "evil", "start", "message"),
    [
        ("script", 1, _KILL, _OWN_GROUP, "rank 1 is lost"),
        ("script", 2, _RAISE, _OWN_GROUP, "rank 2 takes no part .* OSError: no such file"),
        ("script", 1, _RAISE, _GROUP_OF_PIPELINE, "rank 1 takes no part .* OSError: no such file"),
        ("script", 1, "sys.exit()", _OWN_GROUP, "rank 1 takes no part .* its script has ended"),
        ("links", 2, _KILL, _GROUP_OF_PIPELINE, "rank 2 is lost"),
        ("cluster", 0, _KILL, _GROUP_OF_PIPELINE, "rank 0 is lost"),
        ("cluster", 1, _RAISE, _OWN_GROUP, "rank 1 .* OSError: no such file"),
        ("profile", 0, _KILL, _OWN_GROUP, "rank 0 is lost"),
        ("profile", 0, _RAISE, _OWN_GROUP, "rank 0 .* OSError: no such file"),
        ("making", 1, _KILL, _OWN_GROUP, "rank 1 is lost"),
        ("making", 1, _RAISE, _OWN_GROUP, "rank 1 .* OSError: no such file"),
    ],
)
def test_a_rank_that_ends_before_the_first_step_is_named(place, bad, evil, start, message):
    ends = run_ranks(_SCRIPT.format(place=place, bad=bad, evil=evil, start=start), 3, seconds=60)
    for rank, end in enumerate(ends):
        if rank != bad:
            assert end.code == 1, end.text
            profiles = rank == 0 and place == "cluster"  # before it asks the others
            assert end.seconds < (20 if profiles else 10), end.text
            assert re.search(message, end.text), end.text


@pytest.mark.slow
def test_a_rank_that_comes_late_is_waited_for():
    late = _SCRIPT.format(place="script", bad=1, evil="time.sleep(3)", start=_OWN_GROUP)
    for end in run_ranks(late, 3, seconds=60):
        assert end.code == 0, end.text
