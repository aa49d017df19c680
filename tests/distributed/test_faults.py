"""A rank that raises, is killed, hangs or closes the pipeline ends the others at once, with word of what happened."""

import json
from pathlib import Path

import pytest

from tests.support.rank_scripts import RankEnd, run_ranks

# Two calls, then a third in which rank BAD does EVIL at PLACE. Each rank prints what its call raises, and when.
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
        print("fails at", time.time(), flush=True)
        {evil}

class Layer(nn.Linear):
    def forward(self, x):
        at("forward")
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: at("backward"))
        return y

def loss_fn(output, target):
    at("loss")
    return nn.functional.mse_loss(output, target)

torch.manual_seed(0)
model = nn.Sequential(*(Layer(4, 4) for _ in range(size)))
plan = plan_by_hand([str(layer) for layer in range(size)], list(range(1, size)), micro_batches=4)
pipe = pipepart.Pipeline(model, plan, loss_fn=loss_fn, reduction="mean", timeout={timeout})
try:
    for call in range(4):
        now = {place!r} if call == 2 else ""
        at("script")
        pipe.step(torch.ones(8, 4), target=torch.ones(8, 4))
        pipe.clip_grad_norm_(1.0)
except BaseException as error:
    notes = " ".join(getattr(error, "__notes__", ()))
    print("raises at", time.time(), type(error).__name__, str(error), notes, flush=True)
    print("says", repr(pipe), flush=True)
    raise
"""


def faults(size: int, bad: int, place: str, evil: str, timeout: float | None = None) -> list[RankEnd]:
    """Run the script; check that the other ranks have raised, and return how all ended."""
    script = _SCRIPT.format(bad=bad, place=place, evil=evil, timeout=timeout)
    ends = run_ranks(script, size, stays=bad if "SIGSTOP" in evil else None, seconds=100)
    began = next(float(line.split()[-1]) for line in ends[bad].text.splitlines() if line[:8] == "fails at")
    for rank, end in enumerate(ends):
        if rank != bad:
            raised = next(line for line in end.text.splitlines() if line.startswith("raises at"))
            assert float(raised.split()[2]) - began < (timeout or 0) + 5, end.text
            assert end.code == 1, end.text
            assert "terminate called" not in end.text
            assert "closed" in end.text.partition("says ")[2], end.text
    return ends


@pytest.mark.slow
@pytest.mark.parametrize("place", ["forward", "backward", "loss"])
def test_an_exception_in_a_step_reaches_every_rank(place: str):
    bad = 2 if place == "loss" else 1
    ends = faults(3, bad, place, "raise ValueError('out of ideas')")
    for rank in {0, 1, 2} - {bad}:
        text = ends[rank].text
        assert f"RankError: rank {bad} failed: ValueError: out of ideas" in text
        assert f"stage {bad} of 3" in text
        assert "micro-batch 0 of 4" in text
        assert "raise ValueError('out of ideas')" in text or "in at" in text  # the traceback


@pytest.mark.slow
def test_an_exception_between_steps_reaches_every_rank():
    for end in faults(3, 2, "script", "raise OSError('no such batch')")[:2]:
        assert (
            "rank 2 takes no part in this call: its script has ended with OSError: no such batch" in end.text
        )


@pytest.mark.slow
def test_an_exception_without_text_reaches_every_rank():
    assert "rank 1 failed: Unprintable" in faults(2, 1, "forward", "raise Unprintable")[0].text


@pytest.mark.slow
@pytest.mark.parametrize("place", ["forward", "script"])
@pytest.mark.parametrize("bad", [0, 3])
def test_a_killed_rank_is_named_by_all(bad: int, place: str):
    ends = faults(4, bad, place, "os.kill(os.getpid(), signal.SIGKILL)")
    assert ends[bad].code == -9
    assert all(f"rank {bad} is lost" in end.text for rank, end in enumerate(ends) if rank != bad)


@pytest.mark.slow
def test_a_layer_that_does_not_return_ends_all_ranks_at_the_timeout():
    for end in faults(3, 1, "forward", "time.sleep(1000)", timeout=3):
        assert "TimeoutError" in end.text
        assert "rank 0: virtual:0 waits for the gradients of stage 1" in end.text
        assert "rank 1: virtual:1 is in the forward of layer '1' (Layer): stage 1, micro-batch 0" in end.text
        assert "rank 2: virtual:2 waits for the output of stage 1" in end.text


@pytest.mark.slow
def test_a_stopped_process_is_named_at_the_timeout():
    ends = faults(3, 1, "forward", "os.kill(os.getpid(), signal.SIGSTOP)", timeout=3)
    assert "rank 1 does not answer: its process is stopped" in ends[0].text
    assert "rank 1 does not answer: its process is stopped" in ends[2].text


@pytest.mark.slow
def test_a_call_that_a_rank_does_not_make_ends_the_others_at_the_timeout():
    ends = faults(2, 1, "script", "time.sleep(20)", timeout=3)
    assert "rank 0: waits for the other ranks at the begin of step" in ends[0].text
    assert "rank 1: is in the script, between two calls" in ends[0].text


@pytest.mark.slow
def test_a_step_within_a_layer_is_refused_before_the_others_are_asked_to_join():
    ends = faults(3, 1, "forward", "pipe.step(torch.ones(8, 4), target=torch.ones(8, 4))")
    assert all("rank 1 failed: RuntimeError: the pipeline is busy" in ends[rank].text for rank in (0, 2))


@pytest.mark.slow
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
        assert end.code == 0, end.text
        assert "Exception in thread" not in end.text


@pytest.mark.slow
def test_the_exception_is_in_the_summary_of_torchrun(tmp_path: Path):
    record = f'os.environ["TORCHELASTIC_ERROR_FILE"] = f"{tmp_path}/{{rank}}"; '
    faults(2, 1, "script", record + "raise OSError('no such batch')")
    told = json.loads((tmp_path / "1").read_text())["message"]
    assert told["message"] == "OSError: no such batch"
    assert "no such batch" in told["extraInfo"]["py_callstack"]


@pytest.mark.slow
def test_a_pipeline_that_one_rank_closes_is_closed_for_all():
    ends = faults(3, 1, "script", "pipe.close()")
    assert all(
        "rank 1 takes no part in this call: the pipeline is closed there" in ends[rank].text
        for rank in (0, 2)
    )
