"""Steps that are traced: what a trace has of them, and what it says of the plan."""

import contextlib
import json
from typing import Any

import pytest
import torch
from torch import nn

import pipepart
import schedules
from pipepart import Pipeline
from pipepart.runtime.observe import recorder
from pipepart.runtime.observe.trace import Trace
from schedules import Action, Timeline
from tests.support.chains import cut_by_hand, plan_by_hand
from tests.support.trace_format import check_trace_format

pytestmark = pytest.mark.usefixtures("short_profiles")

X, Y = torch.randn(6, 4), torch.randn(6, 2)
LOSS = nn.MSELoss()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Linear(4, 2))


def pipeline(**options: Any) -> Pipeline:
    return cut_by_hand(network(), [2, 3], loss_fn=LOSS, **options)


def last_trace(pipe: Pipeline) -> Timeline:
    assert pipe.last_trace is not None
    return pipe.last_trace


def test_steps_are_traced_within_the_block_and_nowhere_else():
    """An error ends the trace and leaves out its step."""
    with pipeline() as pipe:
        pipe.step(X, target=Y)
        assert pipe.last_trace is None
        with pipe.trace() as trace:
            pipe.step(X, target=Y)
            with contextlib.suppress(KeyError), pipe.trace() as inner:
                pipe.step(X, target=Y)
                raise KeyError
        pipe.step(X, target=Y)
        with pytest.raises(RuntimeError), pipe.trace() as failed:
            pipe.step(torch.randn(6, 5), target=Y)
        assert (len(trace.steps), failed.steps) == (2, [])
        assert trace.steps[1:] == inner.steps
        assert last_trace(pipe) is trace.steps[1]
        assert {step.schedule for step in trace.steps} == {pipe.plan.build_schedule()}


def test_a_step_that_nobody_traces_asks_no_clock(monkeypatch: pytest.MonkeyPatch):
    def asked() -> float:
        raise AssertionError("the time was asked for")

    monkeypatch.setattr(recorder, "_now", asked)
    with pipeline() as pipe:
        pipe.step(X, target=Y)
        with pytest.raises(AssertionError, match="the time was asked for"), pipe.trace():
            pipe.step(X, target=Y)


def test_a_message_is_on_its_way_from_the_end_of_one_action_to_the_start_of_another():
    with pipeline(micro_batches=2, trace=True) as pipe:
        pipe.step(X, target=Y)
        trace = last_trace(pipe)
    assert sorted((t.kind.value, t.source, t.target, t.micro_batch, t.bytes) for t in trace.transfers) == [
        (*way, micro_batch, 3 * width * 4)
        for way, width in ((("B", 1, 0), 8), (("B", 2, 1), 4), (("F", 0, 1), 8), (("F", 1, 2), 4))
        for micro_batch in range(2)
    ]
    for transfer in trace.transfers:
        made, taken = (
            trace.span(Action(transfer.kind, stage, transfer.micro_batch))
            for stage in (transfer.source, transfer.target)
        )
        assert made[1] == transfer.start <= transfer.end <= taken[0]


@pytest.mark.parametrize(("seconds", "median"), [([5, 1, 3], 3), ([7, 2, 9, 4], 4), ([6], 6)])
def test_the_median_is_the_middle_step_or_the_shorter_of_two(seconds, median):
    plan = plan_by_hand(["0", "1"], [1], micro_batches=2)
    costs = [schedules.StageCosts([s] * 2, [s] * 2, [0] * 2) for s in seconds]
    steps = [schedules.simulate(plan.build_schedule(), each) for each in costs]
    assert Trace(plan, steps).median is steps[seconds.index(median)]


def test_a_saved_trace_has_what_was_measured_and_what_was_predicted(tmp_path):
    how: dict[str, Any] = {"micro_batches": 3, "seconds": 0.01, "threads": 1}
    measured = pipepart.profile(network(), X, loss_fn=LOSS, target=Y, **how)
    cluster = pipepart.Cluster.virtual(2, threads=1)
    plan = pipepart.plan(measured, cluster, schedule="1f1b", cut_before=["2"])
    with Pipeline(network(), plan, LOSS) as pipe, pipe.trace() as trace:
        pipe.step(X, target=Y)
    assert trace.predicted == plan.simulate()
    assert trace.ratio == plan.simulate().makespan / trace.steps[0].makespan
    trace.save(tmp_path / "trace.json")
    written = json.loads((tmp_path / "trace.json").read_text())
    read = Timeline.from_trace(written)
    assert (read.idle, read.transfers) == (trace.median.idle, trace.median.transfers)
    check_trace_format(written)
    svg = trace.svg(tmp_path / "trace.svg")
    assert (tmp_path / "trace.svg").read_text(encoding="utf-8") == svg
    assert svg.index("measured: a step of") < svg.index("predicted: a step of")
    assert svg.count(">virtual:1<") == 2
