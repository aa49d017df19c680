"""Which worker runs what, when, and what a trace says of it."""

import contextlib
import json
import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipepart
import schedules
from pipepart import Pipeline
from pipepart.runtime.actions import Act
from pipepart.runtime.observe import recorder
from pipepart.runtime.observe.trace import Trace
from pipepart.runtime.step import Step
from schedules import Action, Kind, Timeline
from tests.pipeline.conformance.runners import split_on_the_critical_path
from tests.support import plain
from tests.support.chains import cut_by_hand, plan_by_hand
from tests.support.trace_format import check_trace_format
from tests.support.two_parts import splits

pytestmark = pytest.mark.usefixtures("short_profiles")


LOSS = nn.MSELoss()


def around_each_action(
    monkeypatch: pytest.MonkeyPatch, around: Callable[[Step, Action, Callable[[], None]], None]
) -> None:
    """Call ``around(step, action, run)`` in place of each action, which ``run()`` runs."""
    begin = Step.begin

    def begin_observed(step: Step) -> None:
        begin(step)

        def act(kind: Kind, stage: int, run: Callable[[int | None], None], micro_batch: int | None) -> None:
            around(step, Action(kind, stage, micro_batch), partial(run, micro_batch))

        tables: dict[int, Mapping[Kind, Act]] = {
            stage: {kind: partial(act, kind, stage, run) for kind, run in table.items()}
            for stage, table in step._tables.items()
        }
        step._tables = tables

    monkeypatch.setattr(Step, "begin", begin_observed)


@splits
def test_weights_get_their_gradients_at_their_own_action(monkeypatch: pytest.MonkeyPatch):
    """A linear layer's at W, those of a normalisation with the input's at I; each that of its micro-batch."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    weights = {"0.weight": "0W0", "0.bias": "0W0", "1.weight": "0I0", "1.bias": "0I0"}
    weights |= {"2.weight": "1W0", "2.bias": "1W0"}
    first: dict[str, tuple[str, Tensor]] = {}

    def note(step: Step, action: Action, run: Callable[[], None]) -> None:
        run()
        for name in weights:
            gradient = model.get_parameter(name).grad
            own = action.stage == (1 if name[0] == "2" else 0)
            if own and gradient is not None and name not in first:
                first[name] = str(action), gradient.clone()

    around_each_action(monkeypatch, note)
    reference = plain.twin(model)
    x, y = torch.randn(6, 4), torch.randn(6, 2)
    with cut_by_hand(model, [2], loss_fn=LOSS, schedule="zb-h1") as pipe:
        pipe.step(x, target=y)
    (LOSS(reference(x[:2]), y[:2]) / 3).backward()
    assert {name: action for name, (action, _) in first.items()} == weights
    plain.assert_same({name: gradient for name, (_, gradient) in first.items()}, plain.gradients(reference))


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
    plan = split_on_the_critical_path(plan_by_hand(list("012345"), [2, 4], micro_batches=4))
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))), torch.randn(8, 8)
    with Pipeline(model, plan, LOSS, trace=True) as pipe:
        pipe.step(x, target=x)
        assert pipe.last_trace is not None
        assert pipe.last_trace.schedule.actions == pipe.plan.build_schedule().actions
        assert [str(action) for action in pipe.last_trace.schedule.actions[2][-2:]] == ["2I3", "2W3"]
        pipe.step(x[:3], target=x[:3])
    assert waited[:3] == [True] * 3


class Remembers(nn.Module):
    """Notes its thread, and where its input and output are."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        self.seen, self.given, self.made = threading.current_thread().name, x.data_ptr(), y.data_ptr()
        return y


@pytest.mark.parametrize(
    ("schedule", "placement"), [("interleaved-1f1b", [0, 1, 0, 1]), ("zb-v", [0, 1, 1, 0])]
)
def test_one_worker_runs_all_stages_of_its_device_and_passes_tensors_without_a_copy(schedule, placement):
    layers = [Remembers() for _ in range(4)]
    cut = partial(cut_by_hand, nn.Sequential(*layers), [1, 2, 3])
    with cut(micro_batches=1, schedule=schedule, chunks=2) as pipe:
        running = [thread.name for thread in threading.enumerate() if thread.name.startswith("pipepart-")]
        assert sorted(running) == ["pipepart-virtual:0", "pipepart-virtual:1"]
        pipe(torch.randn(4, 3, requires_grad=True))
    assert [one.seen for one in layers] == [f"pipepart-virtual:{device}" for device in placement]
    assert [one.given for one in layers[1:]] == [one.made for one in layers[:-1]]


def test_a_trace_has_a_span_for_each_part_of_an_overlapped_pair():
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
    cut = partial(cut_by_hand, model, [1, 2, 3], loss_fn=LOSS, micro_batches=4)
    with cut(schedule="dualpipe-v", chunks=2, trace=True) as pipe:
        pipe.step(torch.randn(8, 5), target=torch.randn(8, 5))
        trace = pipe.last_trace
        assert trace is not None
        built = pipe.plan.build_schedule()
        assert any(action.parts for row in built.actions for action in row)
        assert trace.schedule == schedules.split_overlaps(built)
        assert [len(row) for row in trace.starts] == [len(row) for row in trace.schedule.actions]


def test_sends_and_receives_of_a_plan_are_left_to_the_transport():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    plan = plan_by_hand(["0", "1", "2"], [1], micro_batches=2)
    rows = (
        ("0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"),
        ("1RECV_F0", "1F0", "1RECV_F1", "1B0", "1SEND_B0", "1F1", "1B1", "1SEND_B1"),
    )
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    with Pipeline(
        model, plan.model_copy(update={"schedule": "search", "actions": rows}), nn.MSELoss()
    ) as pipe:
        plain.check_step(pipe, x, y, nn.MSELoss(), 2)


X, Y = torch.randn(6, 4), torch.randn(6, 2)


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


def test_a_message_arrives_when_it_was_sent_or_when_a_waiting_receiver_goes_on():
    schedule = schedules.build("zb-h1", 2, 2)  # 0F0 0F1 0I0 0W0 0I1 0W1 and 1F0 1I0 1F1 1I1 1W0 1W1
    devices: Any = [SimpleNamespace(device=torch.device("cpu"))] * 2
    starts = [0.0, 1.0, 7.0, 8.0, 12.0, 13.0], [1.5, 3.0, 6.0, 8.0, 10.0, 11.0]
    ends = [1.0, 2.0, 8.0, 9.0, 13.0, 14.0], [3.0, 6.0, 8.0, 10.0, 11.0, 12.0]
    messages: list[Any] = [(0, 1, (Kind.F, 1, 0), 4), (0, 1, (Kind.F, 1, 1), 4)]
    messages += [(1, 0, (Kind.I, 0, 0), 4), (1, 0, (Kind.I, 0, 1), 4)]
    run = recorder.Recorder(schedule, devices)
    run.adopt([recorder.RankRecord(dict(enumerate(zip(starts, ends, strict=True))), messages)])
    assert [(one.kind, one.micro_batch, one.start, one.end) for one in run.timeline.transfers] == [
        (Kind.F, 0, 1.0, 1.5),
        (Kind.F, 1, 2.0, 2.0),  # stage 1 was in its first backward
        (Kind.B, 0, 6.0, 7.0),
        (Kind.B, 1, 10.0, 12.0),
    ]
