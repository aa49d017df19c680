"""What a device keeps for its backwards, counted, is to the byte what the plan says that it keeps."""

import gc
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import pipepart
from pipepart import Pipeline, Profile
from pipepart.runtime.step import Step
from tests.support.chains import Recompute, cut_by_hand
from tests.support.saving import saving_network


class Slot:
    """What autograd holds in place of a tensor that it has saved."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


class Counted(nn.Module):
    """A layer or loss whose saved tensors are remembered by the thread that runs it, while autograd holds them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *given: Tensor) -> Tensor:
        state = {tensor.data_ptr() for tensor in self.inner.parameters()}

        def pack(tensor: Tensor) -> Any:
            if tensor.data_ptr() in state:
                return tensor
            slot = Slot(tensor)
            saved[threading.current_thread().name].append(weakref.ref(slot))
            return slot

        with saved_tensors_hooks(pack, lambda slot: slot.tensor if isinstance(slot, Slot) else slot):
            return self.inner(*given)


saved: defaultdict[str, list[weakref.ref[Slot]]] = defaultdict(list)


def count_after_each_action(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The most bytes that each worker holds after an action: inputs of its stages and what autograd has saved."""
    peaks: dict[str, int] = defaultdict(int)
    do = Step.do

    def do_and_count(step: Step, action: Any) -> Any:
        span = do(step, action)
        worker = threading.current_thread().name
        held = [slot.tensor for reference in saved[worker] if (slot := reference()) is not None]
        held += [one for run in step.runs_on(step.schedule.device_of[action.stage]) for one in run.tensors()]
        peaks[worker] = max(peaks[worker], bytes_of(held))
        return span

    monkeypatch.setattr(Step, "do", do_and_count)
    return peaks


def bytes_of(held: Iterable[Tensor]) -> int:
    """Each piece of memory once; micro-batches of one mini-batch are pieces of their own."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values())


CASES = [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("looped-bfs", 2)]


X, Y = torch.linspace(-2, 2, 64 * 16).view(64, 16), torch.zeros(64, 16)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return pipepart.profile(
        saving_network(), X, loss_fn=nn.MSELoss(), target=Y, micro_batches=8, seconds=0.01, threads=1
    )


@pytest.mark.parametrize("recompute", ["never", "except-last", "always"])
@pytest.mark.parametrize(("schedule", "chunks"), CASES)
def test_a_device_keeps_as_much_as_the_plan_says(
    profile, schedule, chunks, recompute: Recompute, monkeypatch
):
    saved.clear()
    plan = pipepart.plan(
        profile,
        pipepart.Cluster.virtual(2, threads=1),
        schedule=schedule,
        recompute=recompute,
        chunks=chunks,
        cut_before=["3", "6", "9"] if chunks == 2 else ["6"],
    )
    assert len(plan.stages) == 2 * chunks
    assert {stage.recompute for stage in plan.stages} == {recompute}
    counted = nn.Sequential(*map(Counted, saving_network()))
    with Pipeline(counted, plan, loss_fn=Counted(nn.MSELoss()), reduction="mean") as pipe:
        pipe.step(X, target=Y)
        saved.clear()
        peaks = count_after_each_action(monkeypatch)
        pipe.step(X, target=Y)
    for worker, predicted in zip(plan.workers, plan.simulate().peak_bytes, strict=True):
        assert peaks[f"pipepart-{worker.name}"] == predicted


class Tag:
    """Something to hold weakly: an attribute of a tensor's memory."""


@pytest.mark.parametrize(("recompute", "most"), [("never", 6), ("except-last", 2), ("always", 1)])
@pytest.mark.parametrize("drop_in", [False, True])
def test_activations_that_are_made_again_are_released_at_once(recompute, most, drop_in):
    """Counted at each forward and backward of GPipe: only what the backward is at, and a last one that is kept."""

    class Watch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[weakref.ref[Tag]] = []
            self.alive: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            self.count()
            y, tag = x.exp(), Tag()
            y.untyped_storage().tag = tag  # type: ignore[attr-defined]
            self.seen.append(weakref.ref(tag))
            y.register_hook(lambda gradient: self.count())
            return y * 1

        def count(self) -> None:
            self.alive.append(sum(tag() is not None for tag in self.seen))

    watches = [Watch() for _ in range(3)]
    model = nn.Sequential(
        nn.Linear(4, 4), watches[0], nn.Linear(4, 4), watches[1], nn.Linear(4, 4), watches[2], nn.Linear(4, 2)
    )
    gc.collect()
    gc.disable()
    try:
        with cut_by_hand(
            model, [2, 4], loss_fn=nn.MSELoss(), micro_batches=6, schedule="gpipe", recompute=recompute
        ) as pipe:
            if drop_in:
                pipe(torch.ones(6, 4)).sum().backward()
            else:
                pipe.step(torch.ones(6, 4), target=torch.zeros(6, 2))
    finally:
        gc.enable()
    for watch in watches:
        forwards = 6 if recompute == "never" else len(watch.alive) - 6
        assert max(watch.alive) == most
        if recompute != "never":
            assert watch.alive[:6] == [0] * 6
        assert forwards == {"never": 6, "except-last": 11, "always": 12}[recompute]
        assert sum(tag() is not None for tag in watch.seen) == 0
