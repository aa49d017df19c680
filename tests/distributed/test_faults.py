"""A rank that raises, is killed, hangs or closes the pipeline ends the others at once, with word of what happened."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest

from tests.support.processes import others_of, run_ranks

pytestmark = pytest.mark.slow

# Two calls, then a third in which rank BAD does EVIL at PLACE. Each rank prints what its call raises.
_SCRIPT = """
import os, signal, time
import torch, torch.distributed
from torch import nn
import pipepart
from tests.support.chains import plan_by_hand

torch.distributed.init_process_group("gloo")
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
now = ""

class Unprintable(Exception):
    def __str__(self):
        raise KeyError("no text")

def at(place):
    if (rank, place) == ({bad}, now):
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

def loss_fn(output, target):
    at("loss")
    return nn.functional.mse_loss(output, target)

def parallelize(layers, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.distributed.fsdp import fully_shard
    at("parallelize")
    for layer in layers.values():
        if "tp" in mesh.mesh_dim_names:
            parallelize_module(layer, mesh["tp"], {{"up": ColwiseParallel(), "down": RowwiseParallel()}})
        else:
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward={reshards})

torch.manual_seed(0)
stages = size // ({replicas} * {tensor})
model = nn.Sequential(*(Layer() for _ in range(stages)))
names = list(map(str, range(stages)))
plan = plan_by_hand(
    names, list(range(1, stages)), micro_batches=4, schedule={schedule!r}, replicas={replicas}, tensor={tensor}
)
try:
    now = {place!r} if {place!r} == "parallelize" else ""
    pipe = pipepart.Pipeline(
        model,
        plan,
        loss_fn=loss_fn,
        reduction="mean",
        timeout={timeout},
        parallelize=parallelize if {replicas} * {tensor} > 1 else None,
    )
    for call in range(4):
        now = {place!r} if call == 2 else ""
        at("script")
        pipe.step(torch.ones(8, 8), target=torch.ones(8, 8))
        pipe.clip_grad_norm_(1.0)
except BaseException as error:
    notes = " ".join(getattr(error, "__notes__", ()))
    print(type(error).__name__, str(error), notes, flush=True)
    print("says", repr(pipe) if "pipe" in globals() else "closed", flush=True)
    raise
"""


class Fault(NamedTuple):
    """What rank ``bad`` does, and what the others say: the rank that fails stands for ``{bad}``."""

    size: int
    bad: int
    place: str
    evil: str
    says: tuple[str, ...]
    timeout: float | None = None
    schedule: str = "1f1b"
    replicas: int = 1
    tensor: int = 1
    reshards: bool = False


_KILL = "os.kill(os.getpid(), signal.SIGKILL)"
_STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
_RAISE = "raise ValueError('out of ideas')"
_IN_STEP = (
    "RankError: rank {bad} failed: ValueError: out of ideas",
    "stage {bad} of 3",
    "micro-batch 0 of 4",
    " in at",
)

FAULTS = {
    "in a forward": Fault(3, 1, "forward", _RAISE, _IN_STEP),
    "in a backward": Fault(3, 1, "backward", _RAISE, _IN_STEP),
    "in the loss": Fault(3, 2, "loss", _RAISE, _IN_STEP),
    "between steps": Fault(
        3,
        2,
        "script",
        "raise OSError('no such batch')",
        ("rank 2 takes no part in this call: its script has ended with OSError: no such batch",),
    ),
    "without text": Fault(2, 1, "forward", "raise Unprintable", ("rank 1 failed: Unprintable",)),
    "first killed in a step": Fault(4, 0, "forward", _KILL, ("rank 0 is lost",)),
    "killed beside a process that it has forked": Fault(
        3, 1, "script", f"os.fork() or (time.sleep(8), os._exit(0)); {_KILL}", ("rank 1 is lost",)
    ),
    "last killed between steps": Fault(4, 3, "script", _KILL, ("rank 3 is lost",)),
    "does not return": Fault(
        3,
        1,
        "forward",
        "time.sleep(1000)",
        (
            "TimeoutError",
            "rank 0: virtual:0 waits for a message of stage 1",
            "rank 1: virtual:1 is in layer '1' (Layer), stage 1, micro-batch 0",
            "rank 2: virtual:2 waits for a message of stage 1",
        ),
        timeout=3,
    ),
    "stopped": Fault(3, 1, "forward", _STOP, ("rank 1 does not answer: its process is stopped",), timeout=3),
    "does not call": Fault(
        2,
        1,
        "script",
        "time.sleep(20)",
        (
            "rank 0: waits for the other ranks at the begin of step",
            "rank 1: is in the script, between two calls",
        ),
        timeout=3,
    ),
    "steps in a layer": Fault(
        3,
        1,
        "forward",
        "pipe.step(torch.ones(8, 8), target=torch.ones(8, 8))",
        ("rank 1 failed: RuntimeError: the pipeline is busy",),
    ),
    "closes": Fault(
        3, 1, "script", "pipe.close()", ("rank 1 takes no part in this call: the pipeline is closed there",)
    ),
}


def ends_of(fault: Fault, stays: int | None = None) -> tuple[list[Any], list[str]]:
    """How all ranks end, and what those without the fault print."""
    ends = run_ranks(_SCRIPT.format(**fault._asdict()), fault.size, stays=stays)
    return ends, others_of(ends, fault.bad)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_rank_is_named_by_all_others(name: str):
    fault = FAULTS[name]
    ends, others = ends_of(fault, fault.bad if fault.evil is _STOP else None)
    for text in others:
        assert "closed" in text.partition("says ")[2], text
        for words in fault.says:
            assert words.format(bad=fault.bad) in text
    assert "is lost" not in fault.says[0] or ends[fault.bad].returncode == -9


@pytest.mark.parametrize("evil", [_KILL, _RAISE], ids=["killed", "raises"])
@pytest.mark.parametrize("place", ["parallelize", "forward", "backward", "script"])
@pytest.mark.parametrize(("replicas", "tensor", "reshards"), [(1, 2, False), (2, 1, False), (2, 1, True)])
def test_so_is_one_for_which_others_wait_within_a_stage(
    replicas: int, tensor: int, reshards: bool, place: str, evil: str
):
    says = "is lost" if evil is _KILL else "failed: ValueError: out of ideas"
    if (evil, place) == (_RAISE, "script"):
        says = "takes no part in this call: its script has ended with ValueError"
    _, others = ends_of(Fault(4, 1, place, evil, (), None, "zb-h1", replicas, tensor, reshards))
    stage = {1: "stage 0 of 2 ", 2: "stage 1 of 2 of copy 0 "}[replicas]
    for text in others:
        assert f"RankError rank 1 {says}" in text
        if evil is _RAISE and place in ("forward", "backward"):
            assert re.search(stage + "on virtual:., micro-batch 0 of 4", text), text


def test_groups_may_be_destroyed_before_the_pipeline_is_closed():
    script = """
import torch, torch.distributed
from torch import nn
import pipepart
from tests.support.chains import plan_by_hand

torch.distributed.init_process_group("gloo")
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
with pipepart.Pipeline(model, plan_by_hand(["0", "1"], [1], micro_batches=2), nn.MSELoss()) as pipe:
    pipe.step(torch.ones(8, 4), target=torch.ones(8, 4))
    torch.distributed.destroy_process_group()
"""
    for end in run_ranks(script, 2):
        assert end.returncode == 0, end.text
        assert "Exception in thread" not in end.text


# Rank BAD does EVIL where {place} is now. The process group is made by the script, or by the pipeline.
_START = """
import os, signal, time
import torch, torch.distributed
from torch import nn
import pipepart
import pipepart.cluster.processes

def at(place):
    if place == {place!r} and rank == {bad}:
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
_NO_FILE = "raise OSError('no such file')"


@pytest.mark.parametrize(
    ("place", "bad", "evil", "start", "message"),
    [
        ("links", 2, _KILL, _GROUP_OF_PIPELINE, "rank 2 is lost"),
        ("cluster", 1, _NO_FILE, _OWN_GROUP, "rank 1 .* OSError: no such file"),
        ("profile", 0, _KILL, _OWN_GROUP, "rank 0 is lost"),
        ("profile", 0, _NO_FILE, _GROUP_OF_PIPELINE, "rank 0 .* OSError: no such file"),
        ("making", 1, _NO_FILE, _OWN_GROUP, "rank 1 .* OSError: no such file"),
    ],
)
def test_a_rank_that_ends_before_the_first_step_is_named(place, bad, evil, start, message):
    ends = run_ranks(_START.format(place=place, bad=bad, evil=evil, start=start), 3)
    for text in others_of(ends, bad):
        assert re.search(message, text), text


def test_a_rank_that_comes_late_is_waited_for():
    late = _START.format(place="script", bad=1, evil="time.sleep(3)", start=_OWN_GROUP)
    for end in run_ranks(late, 3):
        assert end.returncode == 0, end.text
