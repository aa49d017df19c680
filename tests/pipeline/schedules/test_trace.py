"""Steps that are traced: what a trace has of them, and what it says of the plan."""

import contextlib
import json
import statistics
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile

import pipepart
import schedules
from pipepart import Pipeline, Plan
from pipepart.runtime.observe import recorder
from pipepart.runtime.observe.trace import Trace
from schedules import Action, Kind, Timeline
from tests.support.chains import cut_by_hand, plan_by_hand
from tests.support.replicas import cut_replicas
from tests.support.trace_format import check_trace_format

pytestmark = pytest.mark.usefixtures("short_profiles")

X, Y = torch.randn(6, 4), torch.randn(6, 2)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Linear(4, 2))


def pipeline(**options: Any) -> Pipeline:
    return cut_by_hand(network(), [2, 3], loss_fn=nn.MSELoss(), **options)


def measured_plan() -> Plan:
    profile = pipepart.profile(
        network(), X, loss_fn=nn.MSELoss(), target=Y, micro_batches=3, seconds=0.01, threads=1
    )
    return pipepart.plan(profile, pipepart.Cluster.virtual(2, threads=1), schedule="1f1b", cut_before=["2"])


def test_steps_are_traced_within_the_block_and_nowhere_else():
    with pipeline() as pipe:
        pipe.step(X, target=Y)
        assert pipe.last_trace is None
        with pipe.trace() as trace:
            pipe.step(X, target=Y)
            with pipe.trace() as inner:
                pipe.step(X, target=Y)
        pipe.step(X, target=Y)
        assert len(trace.steps) == 2
        assert trace.steps[1:] == inner.steps
        assert pipe.last_trace is trace.steps[1]
        assert {step.schedule for step in trace.steps} == {pipe.plan.build_schedule()}


def test_an_error_ends_the_trace_and_leaves_out_its_step():
    with pipeline() as pipe:
        with contextlib.suppress(KeyError), pipe.trace() as trace:
            pipe.step(X, target=Y)
            raise KeyError
        pipe.step(X, target=Y)
        with pytest.raises(RuntimeError), pipe.trace() as failed:
            pipe.step(torch.randn(6, 5), target=Y)
        assert (len(trace.steps), failed.steps) == (1, [])


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
        trace = pipe.last_trace
    assert trace is not None
    assert sorted((t.kind.value, t.source, t.target, t.micro_batch, t.bytes) for t in trace.transfers) == [
        *(("B", 1, 0, micro_batch, 3 * 8 * 4) for micro_batch in range(2)),
        *(("B", 2, 1, micro_batch, 3 * 4 * 4) for micro_batch in range(2)),
        *(("F", 0, 1, micro_batch, 3 * 8 * 4) for micro_batch in range(2)),
        *(("F", 1, 2, micro_batch, 3 * 4 * 4) for micro_batch in range(2)),
    ]
    for transfer in trace.transfers:
        made, taken = (
            trace.span(Action(transfer.kind, stage, transfer.micro_batch))
            for stage in (transfer.source, transfer.target)
        )
        assert made[1] == transfer.start <= transfer.end <= taken[0]


def test_gradients_of_copies_are_messages_without_a_micro_batch():
    with cut_replicas(network(), [2], 2, loss_fn=nn.MSELoss(), trace=True) as pipe:
        pipe.step(torch.randn(8, 4), target=torch.randn(8, 2))
        assert pipe.last_trace is not None
        summed = [t for t in pipe.last_trace.transfers if t.kind is Kind.REDUCE_GRAD]
    assert sorted((t.source, t.target, t.micro_batch, t.bytes) for t in summed) == [
        (2, 0, None, 4 * (4 * 8 + 8)),
        (3, 1, None, 4 * (8 * 4 + 4 + 4 * 2 + 2)),
    ]


def test_the_median_is_of_steps_of_the_whole_mini_batch_and_a_plan_by_hand_predicts_nothing():
    with pipeline(micro_batches=3) as pipe, pipe.trace() as trace:
        with pytest.raises(ValueError, match="no step of 3 micro-batches was traced"):
            trace.median  # noqa: B018
        for _ in range(3):
            pipe.step(X, target=Y)
        pipe.step(X[:2], target=Y[:2])
        spans = [step.makespan for step in trace.steps[:3]]
        assert trace.median.makespan == statistics.median(spans)
    assert (trace.predicted, trace.ratio) == (None, None)


@pytest.mark.parametrize(("seconds", "median"), [([5, 1, 3], 3), ([7, 2, 9, 4], 4), ([6], 6)])
def test_the_median_is_the_middle_step_or_the_shorter_of_two(seconds, median):
    plan = plan_by_hand(["0", "1"], [1], micro_batches=2)
    steps = [
        schedules.simulate(plan.build_schedule(), schedules.StageCosts([s] * 2, [s] * 2, [0] * 2))
        for s in seconds
    ]
    assert Trace(plan, steps).median is steps[seconds.index(median)]


def test_a_saved_trace_has_what_was_measured_and_what_was_predicted(tmp_path):
    with Pipeline(network(), measured_plan(), nn.MSELoss()) as pipe, pipe.trace() as trace:
        pipe.step(X, target=Y)
    assert trace.predicted == pipe.plan.simulate()
    assert trace.ratio == pipe.plan.simulate().makespan / trace.steps[0].makespan
    trace.save(tmp_path / "trace.json")
    written = json.loads((tmp_path / "trace.json").read_text())
    read = Timeline.from_trace(written)
    assert read.idle == trace.median.idle
    assert read.transfers == trace.median.transfers
    check_trace_format(written)
    names = {e["pid"]: e["args"]["name"] for e in written["traceEvents"] if e["name"] == "process_name"}
    assert names == {0: "measured", 1: "predicted"}
    events = {event["name"] for event in written["traceEvents"]}
    assert {"virtual:0 (stage 0)", "in flight, virtual:1", "stash, virtual:0"} <= events | {
        event["args"]["name"] for event in written["traceEvents"] if event["name"] == "thread_name"
    }
    svg = trace.svg(tmp_path / "trace.svg")
    assert (tmp_path / "trace.svg").read_text(encoding="utf-8") == svg
    assert svg.index("measured: a step of") < svg.index("predicted: a step of")
    assert svg.count(">virtual:1<") == 2


def test_a_profiler_of_all_threads_sees_each_action_once_on_its_worker_also_while_it_is_traced():
    with pipeline(trace=True) as pipe:
        pipe.step(X, target=Y)
        with profile(experimental_config=_ExperimentalConfig(profile_all_threads=True)) as profiler:
            pipe.step(X, target=Y)
        schedule = pipe.plan.build_schedule()
        assert pipe.last_trace is not None
        assert len(pipe.last_trace.transfers) == 12
    seen = [(e.name, e.thread) for e in profiler.events() or () if e.name.startswith("pipepart ")]
    names = [name for name, _ in seen]
    for row in schedule.actions:
        assert all(names.count(f"pipepart {action}") == 1 for action in row)
        assert len({thread for name, thread in seen if name in {f"pipepart {action}" for action in row}}) == 1
    assert len({thread for _, thread in seen}) == schedule.devices
