"""Under torchrun losses, their gradients and what is done with these have the bits of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.distributed.models import (
    CLASSES,
    LOSSES,
    Balanced,
    Overflow,
    classifier,
    labelled,
)
from tests.distributed.training import TIMEOUT, Own, adam, drawn_batches, gradients, trained
from tests.support import tied
from tests.support.chains import cut_by_hand
from tests.support.pieces import WIDTH, linear
from tests.support.ranks import assert_as_in_one_process


def with_ignored_labels(name: str, schedule: str) -> dict[str, Any]:
    pipe = cut_by_hand(
        classifier(), [2, 4], loss_fn=LOSSES[name], micro_batches=4, schedule=schedule, timeout=TIMEOUT
    )
    return trained(pipe, labelled((12, 11, 3, 12)), max_norm=0.1)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [*zip(LOSSES, ["1f1b", "zb-h1", "gpipe", "1f1b"], strict=True), ("known last", "1f1b")],
)
def test_what_a_loss_is_divided_by_is_counted_over_all_micro_batches(name, schedule):
    assert_as_in_one_process(with_ignored_labels, 3, name, schedule)


def with_added_losses(recompute: Any) -> dict[str, Any]:
    layers = [linear(), Balanced(), nn.Tanh(), linear(), Balanced(), nn.Linear(WIDTH, CLASSES)]
    model = nn.Sequential(*layers).double()
    pipe = cut_by_hand(
        model, [2, 4], loss_fn=nn.CrossEntropyLoss(), recompute=recompute, timeout=TIMEOUT, micro_batches=3
    )
    return trained(pipe, labelled((7, 8, 2)))


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_layers_of_several_ranks_add_losses(recompute):
    assert_as_in_one_process(with_added_losses, 3, recompute)


def of_the_whole_batch() -> dict[str, Any]:
    def contrast(output: Tensor, target: Tensor) -> Tensor:
        scores = output @ output.t()
        return functional.cross_entropy(scores, torch.arange(len(output))) + output.mul(target).mean()

    pipe = cut_by_hand(
        nn.Sequential(linear(), nn.Tanh(), linear(), linear()).double(),
        [2],
        loss_fn=contrast,
        reduction="batch",
        schedule="gpipe",
        micro_batches=4,
        timeout=TIMEOUT,
    )
    return trained(pipe, drawn_batches([9, 8, 3]), max_norm=0.1)


def test_a_loss_that_sees_the_whole_mini_batch():
    assert_as_in_one_process(of_the_whole_batch, 2)


def with_optimizers_in_the_stages(name: str) -> dict[str, Any]:
    pipe = cut_by_hand(
        classifier(), [1, 4], loss_fn=LOSSES[name], micro_batches=4, optimizer=adam, timeout=TIMEOUT
    )
    with pipe:
        found: dict[str, Any] = {"losses": []}
        for x, y in labelled((12, 11, 3, 12)):
            found["losses"].append(pipe.step(x, target=y))
        found["state"] = pipe.full_state_dict()
        found["gradients"] = gradients(pipe)
        found["optimizers"] = Own(pipe.optimizer_state_dict()["state"])
    return found


@pytest.mark.parametrize("name", ["ignored", "known last"])
def test_optimizers_of_stages_step_within_the_step(name):
    assert_as_in_one_process(with_optimizers_in_the_stages, 3, name)


def asynchronous(schedule: str) -> dict[str, Any]:
    pipe = cut_by_hand(
        classifier(),
        [1, 4],
        loss_fn=nn.CrossEntropyLoss(),
        micro_batches=12,
        schedule=schedule,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        timeout=TIMEOUT,
    )
    batches = [(x, y.abs() % CLASSES) for x, y in labelled((24, 24, 12))]
    return trained(pipe, batches, optimizer=None)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_asynchronous_schedules(schedule):
    assert_as_in_one_process(asynchronous, 3, schedule)


def clipped(norm_type: float) -> dict[str, Any]:
    norms = []
    with cut_by_hand(classifier(), [2], loss_fn=nn.CrossEntropyLoss(), timeout=TIMEOUT) as pipe:
        for x, y in labelled((12, 6)):
            pipe.zero_grad()
            pipe.step(x, target=y)
            norms.append(pipe.clip_grad_norm_(0.01, norm_type))
        clipped = gradients(pipe)
        pipe.step(torch.full((6, WIDTH), float("inf")).double(), target=torch.zeros(6).long())
        with pytest.raises(RuntimeError, match=r"not finite|non-finite"):
            pipe.clip_grad_norm_(0.01, norm_type, error_if_nonfinite=True)
        pipe.clip_grad_value_(0.5)
    return {"norms": norms, "gradients": clipped}


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.5, float("inf")])
def test_clipping_by_the_norm_of_all_gradients(norm_type):
    assert_as_in_one_process(clipped, 2, norm_type)


def scaled(autocast: bool, frozen: bool) -> dict[str, Any]:
    """The gradients of the first stage alone overflow in the fifth step. ``frozen``: that of the second has none."""
    overflow = Overflow()
    model = nn.Sequential(linear(), overflow, linear(), nn.Tanh(), linear(), nn.Linear(WIDTH, CLASSES))
    model[2].requires_grad_(not frozen)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    found: dict[str, Any] = {"losses": [], "scales": []}
    with cut_by_hand(model, [2, 4], loss_fn=nn.CrossEntropyLoss(), timeout=TIMEOUT) as pipe:
        optimizer = adam([parameter for parameter in pipe.parameters() if parameter.requires_grad])
        for step, (x, y) in enumerate(labelled((7,) * 7)):
            overflow.on = step == 4
            pipe.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                found["losses"].append(pipe.step(x.float(), target=y, scaler=scaler))
            scaler.unscale_(optimizer)
            pipe.clip_grad_norm_(0.5)
            scaler.step(optimizer)
            scaler.update()
            found["scales"].append(scaler.get_scale())
        found["state"] = pipe.full_state_dict()
    return found


@pytest.mark.parametrize(("autocast", "frozen"), [(False, False), (True, False), (False, True)])
def test_an_overflow_on_one_rank_skips_the_step_of_all(autocast, frozen):
    assert_as_in_one_process(scaled, 3, autocast, frozen)


def accumulated(name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"losses": []}
    with cut_by_hand(classifier(), [2], loss_fn=LOSSES[name], timeout=TIMEOUT) as pipe:
        for x, y in labelled((7, 5, 6)):
            loss, output = pipe.step(x, target=y, loss_weight=1 / 3, return_outputs=True)
            found["losses"] += [loss, output, pipe.evaluate(x, target=y)]
        found["gradients"] = gradients(pipe)
        found["norm"] = pipe.clip_grad_norm_(0.1)
    return found


@pytest.mark.parametrize("name", ["sum and count", "known last"])
def test_gradients_of_several_steps_add_up(name):
    assert_as_in_one_process(accumulated, 2, name)


def tied_words(stages: int, schedule: str) -> dict[str, Any]:
    pipe = cut_by_hand(
        tied.language_model().double(),
        [1, 2, 5][-stages + 1 :],
        loss_fn=tied.loss_fn,
        schedule=schedule,
        timeout=TIMEOUT,
    )
    torch.manual_seed(3)
    return trained(pipe, [tied.words(size) for size in (7, 3, 7)], max_norm=0.2)


@pytest.mark.parametrize(("processes", "schedule"), [(3, "1f1b"), (4, "1f1b"), (4, "zb-h1"), (3, "gpipe")])
def test_a_weight_that_three_stages_use(processes, schedule):
    assert_as_in_one_process(tied_words, processes, processes, schedule)
