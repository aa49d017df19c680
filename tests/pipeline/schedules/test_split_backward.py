"""Schedules that split the backward compute the gradients of weights at their own action, with the same numbers."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import schedules
from pipepart import Pipeline, Plan
from pipepart.runtime.step import Step
from schedules import Action, Kind
from tests.pipeline.conformance.runners import split_on_the_critical_path
from tests.support import plain
from tests.support.chains import cut_by_hand, plan_by_hand
from tests.support.observed_actions import after_each_action, around_each_action
from tests.support.two_parts import splits

ONE_STAGE = ("zb-h1", "zb-h2")
TWO_STAGES = ("zb-v", "v-half", "v-min", "interleaved-zb", "dualpipe-v")
SCHEDULES = [*((name, 1) for name in ONE_STAGE), *((name, 2) for name in TWO_STAGES)]


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_a_stage_adds_up_its_weights_in_the_order_of_the_micro_batches(schedule, chunks):
    """What the numbers rest on: no action for weights overtakes another of its stage."""
    for devices in (1, 2, 5):
        for micro_batches in (1, 7, 12):
            built = schedules.build(schedule, devices=devices, micro_batches=micro_batches, chunks=chunks)
            rows = schedules.split_overlaps(built).actions
            for stage in range(built.stages):
                added = [
                    a.micro_batch or 0
                    for row in rows
                    for a in row
                    if a.stage == stage and a.kind in (Kind.B, Kind.W)
                ]
                assert added == sorted(added)
                assert len(added) == micro_batches


@splits
def test_weights_get_their_gradients_at_their_own_action(monkeypatch: pytest.MonkeyPatch):
    """A linear layer's at W, those of a normalisation with the input's at I; each that of its micro-batch."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    weights = {"0.weight": "0W0", "0.bias": "0W0", "1.weight": "0I0", "1.bias": "0I0"}
    weights |= {"2.weight": "1W0", "2.bias": "1W0"}
    first: dict[str, tuple[str, Tensor]] = {}

    def note(step: Step, action: Action) -> None:
        for name in weights:
            gradient = model.get_parameter(name).grad
            own = action.stage == (1 if name[0] == "2" else 0)
            if own and gradient is not None and name not in first:
                first[name] = str(action), gradient.clone()

    after_each_action(monkeypatch, note)
    reference = plain.twin(model)
    x, y = torch.randn(6, 4), torch.randn(6, 2)
    with cut_by_hand(model, [2], loss_fn=nn.MSELoss(), micro_batches=3, schedule="zb-h1") as pipe:
        pipe.step(x, target=y)
    (nn.functional.mse_loss(reference(x[:2]), y[:2]) / 3).backward()
    assert {name: action for name, (action, _) in first.items()} == weights
    expected = plain.gradients(reference)
    plain.assert_same({name: gradient for name, (_, gradient) in first.items()}, expected)


def test_a_trace_has_both_parts_with_times_of_their_own():
    """The parts of a stage follow each other, each with a length."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 2))
    x, y = torch.randn(64, 64), torch.randn(64, 2)
    with cut_by_hand(model, [2], loss_fn=nn.MSELoss(), micro_batches=4, schedule="zb-h1", trace=True) as pipe:
        pipe.step(x, target=y)
        trace = pipe.last_trace
    assert trace is not None
    spans = {
        str(action): (start, end)
        for row in zip(trace.schedule.actions, trace.starts, trace.ends, strict=True)
        for action, start, end in zip(*row, strict=True)
    }
    assert len(spans) == 2 * 4 * 3
    for stage in (0, 1):
        for k in range(4):
            assert spans[f"{stage}F{k}"][1] <= spans[f"{stage}I{k}"][0]
            assert spans[f"{stage}I{k}"][1] <= spans[f"{stage}W{k}"][0] < spans[f"{stage}W{k}"][1]


def split_plan() -> Plan:
    plan = plan_by_hand([str(index) for index in range(6)], [2, 4], micro_batches=4)
    return split_on_the_critical_path(plan)


def test_on_the_critical_path_the_stage_before_goes_on_while_the_weights_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone_on, waited = threading.Event(), []

    def in_turn(step: Step, action: Action, run: Callable[[], None]) -> None:
        if action.stage == 1 and action.kind is Kind.W:
            waited.append(gone_on.wait(30))
        run()
        if action.stage == 0 and action.kind in (Kind.B, Kind.I):
            gone_on.set()

    around_each_action(monkeypatch, in_turn)
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))), torch.randn(8, 8)
    with Pipeline(model, split_plan(), loss_fn=nn.MSELoss(), trace=True) as pipe:
        pipe.step(x, target=x)
        assert pipe.last_trace is not None
        assert pipe.last_trace.schedule.actions == pipe.plan.build_schedule().actions
        assert [str(action) for action in pipe.last_trace.schedule.actions[2][-2:]] == ["2I3", "2W3"]
        pipe.step(x[:3], target=x[:3])
    assert waited[:3] == [True] * 3


def test_large_weights_of_a_backward_that_is_split_on_the_critical_path() -> None:
    """Their gradients are added as they are computed."""
    model = nn.Sequential(
        nn.Linear(384, 8), nn.GELU(), nn.Linear(8, 384), nn.GELU(), nn.Linear(384, 384), nn.GELU()
    )
    reference, x = plain.twin(model), torch.randn(16, 384)
    with Pipeline(model, split_plan(), loss_fn=nn.MSELoss()) as pipe:
        for samples in (16, 3):
            pipe.step(x[:samples], target=x[:samples])
            plain.micro_batched_step(reference, x[:samples], x[:samples], nn.MSELoss(), min(4, samples))
    plain.assert_same(plain.gradients(model), plain.gradients(reference))
