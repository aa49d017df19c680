"""Plans pass gradients on early where that shortens their step, and where the parts of backwards were timed."""

from dataclasses import replace
from typing import Any

import pytest

import pipepart
import schedules
from pipepart import Cluster, Device, Plan
from pipepart.planning import refine
from schedules import Kind
from tests.planning.plan_edits import edited
from tests.planning.problems import Layer, profile_of

LAYERS = [Layer(1.0, 1.0, 1.0, parameters=4, output=8, saved=16, waiting=20, split=0.02)] * 8


def planned(
    layers: list[Layer] = LAYERS, memory: int | None = None, schedule: str = "1f1b", **options: Any
) -> Plan:
    devices = tuple(Device(name=f"d{index}", kind="cpu", memory_bytes=memory) for index in range(2))
    return pipepart.plan(
        profile_of(layers), Cluster(devices=devices), schedule=schedule, **{"micro_batches": 4, **options}
    )


def test_the_last_backward_passes_its_gradient_on_early() -> None:
    made = planned()
    assert made.split_critical == ("1B3",)
    # Seconds of a micro-batch: forward 1, backward 2 on each of two devices; the weights' half of the last
    # backward is hidden, and its split costs one hundredth.
    assert made.predicted.step_seconds == pytest.approx(15 - 1 + 0.01)
    assert made.simulate().makespan == made.predicted.step_seconds


def test_parts_that_were_not_timed_are_not_counted_on() -> None:
    made = planned([replace(layer, split=None) for layer in LAYERS])
    assert made.split_critical == ()
    assert made.predicted.step_seconds == pytest.approx(15)


def test_memory_that_does_not_do_for_it_is_kept_to() -> None:
    free = planned(schedule="1f1b")
    plain = planned([replace(layer, split=None) for layer in LAYERS])
    needs, enough = max(plain.predicted.memory_bytes), max(free.predicted.memory_bytes)
    assert planned(memory=max(needs, enough)).split_critical == ("1B3",)
    layers = [replace(layer, waiting=2000) for layer in LAYERS]
    tight = planned(layers, memory=max(planned(layers).predicted.memory_bytes) - 1)
    assert tight.split_critical == ()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            {"split_critical": ["1B9"]},
            "split_critical names what is no full backward: 1f1b has no full backward 1B9 to split",
        ),
        (
            {"schedule": "zb-h1"},
            "split_critical names what is no full backward: zb-h1 has no full backward 1B3",
        ),
        ({"schedule": "pipedream"}, "schedule 'pipedream' is asynchronous: its backwards cannot be split"),
        ({"split_critical": ["later"]}, "split_critical names what is no full backward"),
    ],
)
def test_what_is_not_there_is_refused(change, fault, tmp_path) -> None:
    with pytest.raises(ValueError, match=fault):
        Plan.load(edited(planned(), lambda data: data.update(change), tmp_path / "plan.json"))


def test_fewer_micro_batches_have_none() -> None:
    rows = planned().build_schedule(3).actions
    assert rows == schedules.build("1f1b", 2, 3).actions


@pytest.mark.parametrize("split", [-0.1, 0.02])
def test_costs_are_found_again_from_a_step(split: float) -> None:
    layers = [replace(layer, split=split) for layer in LAYERS]
    made = planned(layers)
    weights = sum(action.kind is Kind.W for row in made.build_schedule().actions for action in row)
    assert weights == (8 if split < 0 else 1)
    wrong = profile_of([replace(layer, backward_input=3.0, split=2 * split) for layer in layers])
    found = refine(wrong, made, made.simulate())
    expected = profile_of(layers).costs[0].layers[0]
    assert found.costs[0].layers[0].backward_seconds == pytest.approx(expected.backward_seconds, rel=0.01)
