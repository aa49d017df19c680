"""Under torchrun chimera, whose ranks have stages of two copies of the model, trains to the bits of one process."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from pipepart import Pipeline
from tests.distributed.test_differentiable import chain, trained_by_caller
from tests.distributed.training import TIMEOUT, adam, drawn_batches, gradients, trained
from tests.support import skipping
from tests.support.chains import cut_by_hand, plan_by_hand
from tests.support.pieces import WIDTH, linear
from tests.support.ranks import assert_as_in_one_process, ranks
from tests.support.recorded import piped

SIZES = [12, 7, 3, 12]


def cut(devices: int, tied: bool = False, recompute: Any = "never", **options: Any) -> Pipeline:
    model = chain(tied)
    borders = [len(model) * stage // devices for stage in range(1, devices)]
    return cut_by_hand(
        model,
        borders,
        loss_fn=nn.MSELoss(),
        schedule="chimera",
        micro_batches=6,
        recompute=recompute,
        timeout=TIMEOUT,
        **options,
    )


def steps(devices: int, tied: bool, recompute: Any) -> dict[str, Any]:
    batches = drawn_batches(SIZES)
    for x, _ in batches:
        x.requires_grad_()
    found = trained(cut(devices, tied, recompute), batches, max_norm=0.2)
    return {**found, "inputs": [x.grad for x, _ in batches]}


@pytest.mark.parametrize(
    ("processes", "devices", "tied", "recompute"),
    [(2, 2, True, "never"), (4, 4, True, "always"), (2, 4, True, "never"), (4, 4, False, "except-last")],
)
def test_a_step_is_that_of_one_process(processes, devices, tied, recompute):
    assert_as_in_one_process(steps, processes, devices, tied, recompute)


def with_optimizers_in_the_stages() -> dict[str, Any]:
    return trained(cut(4, optimizer=adam), drawn_batches(SIZES), optimizer=None)


def of_the_caller() -> dict[str, Any]:
    return trained_by_caller(cut(4, tied=True), nn.MSELoss())


def with_skips() -> dict[str, Any]:
    x = drawn_batches([8])[0][0]
    model = skipping.Hourglass(4).double()
    pipe = piped(model, x, loss_fn=nn.MSELoss(), stages=4, parts=4, schedule="chimera", timeout=TIMEOUT)
    return trained(pipe, drawn_batches([8, 3, 8]))


@pytest.mark.parametrize("case", [with_optimizers_in_the_stages, of_the_caller, with_skips])
def test_what_else_a_step_may_have(case):
    assert_as_in_one_process(case, 4)


def loaded_and_added_up() -> dict[str, Any]:
    """A state dict reaches the copies, and two mini-batches make up one step."""
    state = chain().state_dict()
    found: dict[str, Any] = {"losses": []}
    with cut(2) as pipe:
        pipe.load_state_dict({key: value * 0.5 for key, value in state.items()})
        for x, y in drawn_batches(SIZES):
            found["losses"].append(pipe.step(x, target=y, loss_weight=0.5))
        found["gradients"] = gradients(pipe)
    return found


def test_values_that_are_loaded_and_gradients_that_add_up():
    assert_as_in_one_process(loaded_and_added_up, 2)


def odd() -> None:
    model = nn.Sequential(*[linear() for _ in range(6)])
    plan = plan_by_hand(list("012345"), [1, 2, 3, 4, 5], micro_batches=6, schedule="chimera")
    with pytest.raises(ValueError, match="rank 1 would have both: start an even number of processes"):
        Pipeline(model, plan, nn.MSELoss(), timeout=TIMEOUT)


def writing() -> dict[str, Any]:
    """A layer that writes its buffer is refused before anything runs; in evaluation mode it trains."""
    model = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), linear(), linear()).double()
    x, y = drawn_batches([8])[0]
    with cut_by_hand(
        model, [2], loss_fn=nn.MSELoss(), schedule="chimera", micro_batches=4, timeout=TIMEOUT
    ) as pipe:
        with pytest.raises(ValueError, match="running_mean"):
            pipe.step(x, target=y)
        pipe.eval()
        return {"loss": pipe.step(x, target=y), "gradients": gradients(pipe)}


def test_what_one_process_refuses_is_refused():
    ranks(3).run(odd)
    assert_as_in_one_process(writing, 2)
