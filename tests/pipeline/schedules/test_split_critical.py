"""Backwards that are split on the critical path: the stage before goes on meanwhile, and no number changes."""

import threading
from typing import Any

import pytest
import torch
from torch import nn

from pipepart import Pipeline, Plan
from pipepart.capture import flatten
from pipepart.runtime.step import Step
from schedules import Action, Kind
from tests.support import plain
from tests.support.chains import Recompute, plan_by_hand

SAMPLES = torch.randn(16, 384, generator=torch.Generator().manual_seed(1))
TARGET = torch.randn(16, 384, generator=torch.Generator().manual_seed(2))


def network() -> nn.Sequential:
    """Large layers, whose gradients are added as they are computed, and small ones."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(384, 384),
        nn.LayerNorm(384),
        nn.Linear(384, 8),
        nn.GELU(),
        nn.Linear(8, 384),
        nn.Linear(384, 384),
    )


def split_plan(model: nn.Sequential, schedule: str = "1f1b", recompute: Recompute = "never") -> Plan:
    names = [name for name, _ in flatten(model)]
    plan = plan_by_hand(names, [2, 4], micro_batches=4, schedule=schedule, recompute=recompute)
    whole = [action for row in plan.build_schedule().actions for action in row if action.kind is Kind.B]
    chosen = [action for action in whole if action.stage > 0 and action.micro_batch != 1]
    return plan.model_copy(update={"split_critical": tuple(map(str, chosen))})


@pytest.mark.parametrize(
    ("schedule", "recompute", "options"),
    [
        ("gpipe", "never", {"strict": True}),
        ("1f1b", "never", {}),
        ("1f1b", "always", {"strict": True}),
        ("eager-1f1b", "except-last", {"trace": True}),
    ],
)
def test_the_numbers_are_those_of_plain_micro_batches(
    schedule: str, recompute: Recompute, options: dict[str, Any]
) -> None:
    reference, ours = network(), network()
    with Pipeline(ours, split_plan(ours, schedule, recompute), loss_fn=nn.MSELoss(), **options) as pipe:
        for _ in range(3):
            expected = plain.micro_batched_step(reference, SAMPLES, TARGET, nn.MSELoss(), 4)
            assert torch.equal(pipe.step(SAMPLES, target=TARGET), expected)
    plain.assert_same(plain.gradients(ours), plain.gradients(reference))


def test_a_mini_batch_with_fewer_parts_has_the_same_numbers() -> None:
    reference, ours = network(), network()
    with Pipeline(ours, split_plan(ours), loss_fn=nn.MSELoss()) as pipe:
        pipe.step(SAMPLES[:3], target=TARGET[:3])
    plain.micro_batched_step(reference, SAMPLES[:3], TARGET[:3], nn.MSELoss(), 3)
    plain.assert_same(plain.gradients(ours), plain.gradients(reference))


def test_the_stage_before_goes_on_while_the_weights_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, gone_on, waited = network(), threading.Event(), []
    do = Step.do

    def do_in_turn(step: Step, action: Action) -> None:
        if action.stage == 1 and action.kind is Kind.W:
            waited.append(gone_on.wait(30))
        do(step, action)
        if action.stage == 0 and action.kind in (Kind.B, Kind.I):
            gone_on.set()

    monkeypatch.setattr(Step, "do", do_in_turn)
    with Pipeline(model, split_plan(model), loss_fn=nn.MSELoss()) as pipe:
        pipe.step(SAMPLES, target=TARGET)
    assert waited == [True] * 3


def test_the_trace_shows_both_parts() -> None:
    model = network()
    with Pipeline(model, split_plan(model), loss_fn=nn.MSELoss(), trace=True) as pipe:
        pipe.step(SAMPLES, target=TARGET)
        assert pipe.last_trace is not None
        assert pipe.last_trace.schedule.actions == pipe.plan.build_schedule().actions
        last = [str(action) for action in pipe.last_trace.schedule.actions[2][-2:]]
    assert last == ["2I3", "2W3"]
