"""What a stage holds, counted in its graphs, is what was planned; under a split backward as each part needs it."""

import functools
import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

import pipepart
from pipepart import Pipeline, Profile
from pipepart.autograd.own_copy import tensors
from pipepart.autograd.split_backward import WeightGradients
from pipepart.runtime.stage_run import Stash
from pipepart.runtime.step import Step
from schedules import Action
from tests.support.chains import Recompute, cut_by_hand
from tests.support.observed_actions import after_each_action
from tests.support.pairwise import pairwise
from tests.support.two_parts import splits

pytestmark = pytest.mark.usefixtures("short_profiles")


def held_bytes(step: Step, stage: int) -> int:
    """Bytes of every tensor that a stage's graphs and its waiting weights keep alive, parameters apart."""
    return sum({t.data_ptr(): t.nbytes for t in held_tensors(step, stage)}.values())


def held_tensors(step: Step, stage: int) -> list[Tensor]:
    own = {p.data_ptr() for _, module in step.runs[stage].stage.layers for p in module.parameters()}
    found = [tensor for stash in step.runs[stage].stashes.values() for tensor in saved_in(stash.roots)]
    found += [leaf for stash in step.runs[stage].stashes.values() for leaf in stash.entered[0]]
    found += [tensor for deferred in step.runs[stage].deferred.values() for tensor in deferred.tensors()]
    return [tensor for tensor in found if tensor.data_ptr() not in own]


def saved_in(roots: Iterable[Any]) -> Iterator[Tensor]:
    """All that autograd has saved in a graph."""
    seen: set[Node] = set()
    waiting = [root.node for root in roots]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        names = [name for name in dir(node) if name.startswith("_saved_")]
        values = [getattr(node, name) for name in names]
        yield from (value for value in values if isinstance(value, Tensor))
        yield from getattr(node, "saved_tensors", ())


def bytes_after_each_action(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[tuple[str, int]]]:
    """For each stage what it holds after each of its actions, in their order."""
    found: dict[int, list[tuple[str, int]]] = defaultdict(list)

    def count(step: Step, action: Action) -> None:
        found[action.stage].append((str(action), held_bytes(step, action.stage)))

    after_each_action(monkeypatch, count)
    return found


ROW = 4 * 16  # bytes of one sample between two layers


def network() -> nn.Sequential:
    """Two stages of the same layers: two linear ones and two that keep something for their input's gradient alone."""
    stage = (lambda: nn.Linear(16, 16), nn.GELU, lambda: nn.Linear(16, 16), nn.GELU)
    return nn.Sequential(*(make() for make in stage * 2))


@splits
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_stage_holds_what_its_parts_need(recompute: Recompute, monkeypatch: pytest.MonkeyPatch):
    """Before I the input of each layer, after it input and output gradient of the linear ones, after W nothing."""
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    with cut_by_hand(
        network(), [4], loss_fn=nn.MSELoss(), micro_batches=4, schedule="zb-h1", recompute=recompute
    ) as pipe:
        found = bytes_after_each_action(monkeypatch)
        pipe.step(x, target=y)
    micro_batch = 2 * ROW
    before, after = 4 * micro_batch, 4 * micro_batch
    if recompute == "never":
        assert dict(found[0])["0F0"] == before
        assert dict(found[1])["1F0"] == before + 2 * micro_batch  # output and target, which the loss keeps
    else:
        assert dict(found[0])["0F0"] == 0
    assert dict(found[0])["0I0"] == after + (before if recompute == "never" else 0)  # beside micro-batch 1
    assert found[0][-1] == ("0W3", 0)
    assert found[1][-1] == ("1W3", 0)
    assert dict(found[1])["1I3"] == 2 * after  # that of micro-batch 2 waits as well
    assert dict(found[1])["1W2"] == after


def peak_of_each_device(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The most bytes that the stages of each device hold together after any of its actions."""
    peaks: dict[int, int] = defaultdict(int)

    def count(step: Step, action: Action) -> None:
        device = step.schedule.device_of[action.stage]
        found = [t for stage in step.schedule.stages_of(device) for t in held_tensors(step, stage)]
        for run in step.runs_on(device):
            found += [leaf for stash in run.stashes.values() for leaf in stash.entered[0]]
            found += [tensor for kept in run.inputs.values() for tensor in tensors(kept.message)]
            found += [tensor for deferred in run.deferred.values() for tensor in deferred.tensors()]
        peaks[device] = max(peaks[device], sum({t.data_ptr(): t.nbytes for t in found}.values()))

    after_each_action(monkeypatch, count)
    return peaks


X, Y = torch.linspace(-2, 2, 64 * 16).view(64, 16), torch.zeros(64, 16)


@functools.cache
def profiled(linear: bool) -> tuple[nn.Sequential, Profile]:
    """A model of linear layers alone or with activations, and its profile."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8))) if linear else network()
    options: dict[str, Any] = {"micro_batches": 8, "seconds": 0.01, "threads": 1, "progress": False}
    return model, pipepart.profile(model, X, loss_fn=nn.MSELoss(), target=Y, **options)


ORDERS = [
    *(("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("looped-bfs", 2)),
    *(("zb-h1", 1), ("zb-v", 2), ("v-half", 2)),
]


@splits
@pytest.mark.parametrize(
    ("order", "recompute", "linear"),
    pairwise(ORDERS, ["never", "except-last", "always"], [True, False]),
)
def test_a_device_keeps_as_much_as_the_plan_says(order, recompute: Recompute, linear: bool, monkeypatch):
    """Also where more waits for the weights than the stash was, as in linear layers alone."""
    (schedule, chunks), (model, profile) = order, profiled(linear)
    plan = pipepart.plan(
        profile,
        pipepart.Cluster.virtual(2, threads=1),
        schedule=schedule,
        recompute=recompute,
        chunks=chunks if chunks > 1 else None,
        cut_before=["2", "4", "6"] if chunks == 2 else ["4"],
    )
    assert {stage.recompute for stage in plan.stages} == {recompute}
    with Pipeline(model, plan, loss_fn=nn.MSELoss(), reduction="mean") as pipe:
        pipe.step(X, target=Y)
        peaks = peak_of_each_device(monkeypatch)
        pipe.step(X, target=Y)
    predicted = plan.simulate().peak_bytes
    assert [peaks[device] for device in range(2)] == pytest.approx(predicted, rel=0.05)


@splits
def test_a_failed_step_leaves_no_weights_waiting():
    """Nor stashes, though the exception with its traceback is still there."""
    calls: list[int] = []

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 1
            y.register_hook(self.count)
            return y

        def count(self, gradient: Tensor) -> None:
            calls.append(1)
            if len(calls) == 3:
                raise ValueError("on purpose")

    model = nn.Sequential(nn.Linear(16, 16), Fails(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    others = kept()  # by steps of other tests, as in threads that they gave up
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss(), micro_batches=4, schedule="zb-h1") as pipe:
        with pytest.raises(ValueError, match="on purpose") as caught:
            pipe.step(torch.randn(8, 16), target=torch.randn(8, 16))
        own = [one for one in kept() if not any(one is other for other in others)]
        in_frames = [stash for stash in own if type(stash) is Stash]
    assert caught.value is not None
    assert len(in_frames) <= 1  # that of the backward that failed
    assert len(own) == len(in_frames)


def kept() -> list[Any]:
    """What any step has kept for its backwards."""
    return [one for one in gc.get_objects() if type(one) in (Stash, WeightGradients)]
