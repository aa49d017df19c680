"""The overhead of the runtime is that of a small pipeline, measured once a process."""

import pytest
import torch
from torch import nn

import pipepart
from pipepart import measure
from pipepart.profiling import Overhead
from pipepart.runtime import overhead


def test_gaps_between_spans_are_actions_and_messages():
    """A gap from B to F of one layer is an action; one between layers is an action and a message."""

    def step(action: float, message: float) -> list[overhead.Span]:
        at, spans = 0.0, []
        for layer, kind, gap in (
            (0, "F", 0.0),
            (1, "F", action + message),
            (1, "B", 50.0),  # the loss
            (0, "B", action + message),
            (0, "F", action),
            (1, "F", action + message),
        ):
            at += gap
            spans.append((layer, kind, at, at + 1))
            at += 1
        return spans

    steps = [step(2.0, 3.0), step(2.0, 3.0), step(40.0, 400.0)]  # a disturbed step does not count
    seconds = [spans[-1][3] + 6.0 for spans in steps]  # 6 s before the first action and after the last
    expected = Overhead(action_seconds=2.0, message_seconds=3.0, step_seconds=4.0)
    assert overhead._overhead(steps, seconds) == expected


def test_it_is_measured_once_by_a_pipeline_of_two_workers_and_leaves_no_trace():
    overhead.measured_overhead.cache_clear()
    state = torch.get_rng_state()
    with torch.no_grad(), torch.device("meta"):  # modes of the caller do not count
        found = overhead.measured_overhead()
    assert found.action_seconds > 0
    assert found.step_seconds > 0
    assert found.devices == 1
    assert overhead.measured_overhead() is found
    assert torch.equal(torch.get_rng_state(), state)


def test_a_measured_profile_has_it(monkeypatch: pytest.MonkeyPatch):
    runtime = Overhead(action_seconds=1.5, message_seconds=0.5, step_seconds=0.25)
    monkeypatch.setattr(measure, "measured_overhead", lambda: runtime)
    found = pipepart.profile(nn.Sequential(nn.Linear(4, 4)), torch.randn(8, 4), seconds=0, devices=1).overhead
    assert found == runtime.model_copy(update={"cores": found.cores})
