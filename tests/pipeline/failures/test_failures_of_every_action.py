"""Any kind of action may fail on any stage: its own error, the right place, nothing hangs, the next step is right."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipepart import Pipeline
from pipepart.capture import flatten
from pipepart.runtime import stage_run
from pipepart.runtime.sinks import MicroBatchLossSink
from pipepart.runtime.stage_run import StageRun
from pipepart.runtime.state.replicas import Replica
from pipepart.runtime.step import PARTS
from schedules import Kind
from tests.support import plain
from tests.support.chains import plan_by_hand
from tests.support.fuses import Trouble, notes
from tests.support.pairwise import pairwise
from tests.support.replicas import IN_TURN, summed_step

X, Y = torch.linspace(-1, 1, 32).view(8, 4), torch.linspace(1, -1, 32).view(8, 4)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


# What runs an action of each kind, the letter of the kind, and plans that have it.
PLACES: dict[str, tuple[Kind, str, dict[str, Any]]] = {
    "F of 1f1b": (Kind.F, "F", {"schedule": "1f1b"}),
    "F of gpipe": (Kind.F, "F", {"schedule": "gpipe"}),
    "B of 1f1b": (Kind.B, "B", {"schedule": "1f1b"}),
    "B of sequential": (Kind.B, "B", {"schedule": "sequential"}),
    "I of zb-h1": (Kind.I, "I", {"schedule": "zb-h1"}),
    "W of zb-h1": (Kind.W, "W", {"schedule": "zb-h1"}),
    "F of recompute": (Kind.F, "", {"schedule": "1f1b", "recompute": "always"}),
}


@contextmanager
def failing(owner: Any, method: str, picked: Callable[[Any], bool], call: int) -> Iterator[None]:
    """A method, or a function of a module, fails in its call number ``call`` with first arguments that are picked."""
    original = getattr(owner, method)
    calls = 0

    def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if picked(self):
            calls += 1
            if calls == call + 1:
                raise Trouble(call, reason=method)
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, fail)
        yield


@contextmanager
def failing_action(kind: Kind, stage: int, call: int) -> Iterator[None]:
    """What a stage computes for a kind of action fails in its call number ``call``."""
    recv, compute, send = PARTS[kind]
    calls = 0

    def fail(run: StageRun, *given: Any) -> Any:
        nonlocal calls
        if run.index == stage:
            calls += 1
            if calls == call + 1:
                raise Trouble(call, reason=str(kind))
        return compute(run, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PARTS, kind, (recv, fail, send))
        yield


def network() -> nn.Sequential:
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()]
    return nn.Sequential(*layers)


def workers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("pipepart-")}


def check_that_it_goes_on(pipe: Pipeline, model: nn.Module) -> None:
    reference = plain.twin(model)
    reference.zero_grad()
    pipe.zero_grad()
    pipe.step(X, target=Y)
    plain.micro_batched_step(reference, X, Y, nn.MSELoss(), 4)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


@pytest.mark.parametrize(("place", "stage", "call"), pairwise(PLACES, [0, 1, 2], [0, 2]))
def test_an_action_of_a_stage(place, stage, call):
    kind, letter, how = PLACES[place]
    model = network()
    plan = plan_by_hand([str(index) for index in range(6)], [2, 4], micro_batches=4, **how)
    with Pipeline(model, plan, nn.MSELoss(), timeout=60) as pipe:
        before = workers()
        with failing_action(kind, stage, call), pytest.raises(Trouble) as caught:
            pipe.step(X, target=Y)
        assert (caught.value.code, caught.value.reason) == (call, str(kind))
        assert f"stage {stage} of 3 on virtual:{stage}, micro-batch " in notes(caught.value)
        assert f"(action {stage}{letter}" in notes(caught.value)
        assert workers() == before
        check_that_it_goes_on(pipe, model)


@pytest.mark.parametrize(("kind", "stage"), [(Kind.F, 3), (Kind.B, 1)])
def test_an_action_of_one_of_two_stages_of_a_device(kind, stage):
    model = network()
    plan = plan_by_hand(
        [str(index) for index in range(6)], [1, 3, 4], micro_batches=4, schedule="interleaved-1f1b", chunks=2
    )
    with Pipeline(model, plan, nn.MSELoss(), timeout=60) as pipe:
        with failing_action(kind, stage, 1), pytest.raises(Trouble) as caught:
            pipe.step(X, target=Y)
        assert f"stage {stage} of 4 on virtual:{stage % 2}, micro-batch " in notes(caught.value)
        pipe.step(X, target=Y)


@pytest.mark.parametrize("method", ["receive", "gradients"])
def test_what_the_last_stage_asks_of_the_loss(method):
    model = network()
    plan = plan_by_hand([str(index) for index in range(6)], [2, 4], micro_batches=4)
    with Pipeline(model, plan, nn.MSELoss(), timeout=60) as pipe:
        with failing(MicroBatchLossSink, method, lambda one: True, 2), pytest.raises(Trouble) as caught:
            pipe.step(X, target=Y)
        assert "stage 2 of 3 on virtual:2, micro-batch 2 of 4" in notes(caught.value)
        check_that_it_goes_on(pipe, model)


@pytest.mark.parametrize("stage", [0, 2])
def test_the_step_of_a_stages_optimizer(stage):
    model = network()
    plan = plan_by_hand([str(index) for index in range(6)], [2, 4], micro_batches=4)
    with Pipeline(model, plan, nn.MSELoss(), optimizer=sgd, timeout=60) as pipe:
        mine = pipe.optimizers[stage]
        with (
            failing(torch.optim.SGD, "step", lambda one: one is mine, 0),
            pytest.raises(Trouble) as caught,
        ):
            pipe.step(X, target=Y)
        assert "in the step of its optimizer (SGD)" in notes(caught.value)
        assert f"stage {stage} of 3 on virtual:{stage}, all micro-batches (action {stage}OPT_STEP)" in notes(
            caught.value
        )
        check_that_it_goes_on(pipe, model)


@pytest.mark.parametrize(
    ("owner", "method", "stages"), [(Replica, "hand_over", "23"), (stage_run, "add_gradients", "01")]
)
def test_the_sum_of_the_gradients_of_two_copies(owner, method, stages):
    model = plain.in_double(network())
    x, y = X.double(), Y.double()
    plan = plan_by_hand([name for name, _ in flatten(model)], [3], replicas=2, micro_batches=4)
    with Pipeline(model, plan, nn.MSELoss(), timeout=60) as pipe:
        with failing(owner, method, lambda replica: True, 0), pytest.raises(Trouble) as caught:
            pipe.step(x, target=y)
        assert re.search(rf"\(action [{stages}]REDUCE_GRAD\)", notes(caught.value))
        reference = plain.twin(model)
        reference.zero_grad()
        pipe.zero_grad()
        pipe.step(x, target=y)
    summed_step(reference, x, y, nn.MSELoss(), IN_TURN)
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_a_split_of_the_callers():
    def split(pair: Any, parts: int) -> Any:
        raise Trouble(1, reason="split")

    model = network()
    plan = plan_by_hand([str(index) for index in range(6)], [2, 4], micro_batches=4)
    with Pipeline(model, plan, nn.MSELoss(), split=split) as pipe, pytest.raises(Trouble):
        pipe.step(X, target=Y)


def test_a_tensor_of_the_callers_that_objects_to_being_computed_with():
    class Stubborn(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is nn.functional.linear:
                raise Trouble(2, reason="linear")
            return super().__torch_function__(func, types, args, kwargs or {})

    model = network()
    plan = plan_by_hand([str(index) for index in range(6)], [2, 4], micro_batches=4)
    with Pipeline(model, plan, nn.MSELoss(), timeout=60) as pipe:
        with pytest.raises(Trouble) as caught:
            pipe.step(X.as_subclass(Stubborn), target=Y)
        assert "in the forward of layer '0' (Linear)" in notes(caught.value)
        check_that_it_goes_on(pipe, model)


def test_an_exception_that_takes_no_notes_arrives_as_it_is():
    class Silent(Exception):
        def add_note(self, note: str) -> None:
            raise TypeError("no notes")

    class Raise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise Silent("from a layer")

    model = nn.Sequential(nn.Linear(4, 4), Raise(), nn.Linear(4, 4))
    plan = plan_by_hand(["0", "1", "2"], [1, 2], micro_batches=4)
    with Pipeline(model, plan, nn.MSELoss()) as pipe, pytest.raises(Silent, match="from a layer"):
        pipe.step(X, target=Y)
