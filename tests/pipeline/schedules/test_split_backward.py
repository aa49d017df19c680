"""Schedules that split the backward compute the gradients of weights at their own action, with the same numbers."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipepart import Pipeline, Plan
from pipepart.runtime.step import Step
from schedules import Action, Kind
from tests.pipeline.conformance.runners import split_on_the_critical_path
from tests.support import plain
from tests.support.chains import cut_by_hand, plan_by_hand
from tests.support.observed_actions import after_each_action, around_each_action
from tests.support.two_parts import splits


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
