"""A step on accelerators is timed by events on their streams, on one axis with the host's clock."""

import time

import pytest
import torch
from torch import Tensor, nn

from pipepart import Pipeline
from schedules import Kind, Timeline
from tests.support.chains import on_devices, plan_by_hand
from tests.support.on_devices import cut_on
from tests.vdev import devices as vdev

TIMER = 0.06  # seconds that a slow layer computes for, on either clock


class Slow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(TIMER)
        return x * 2


def traced(*devices: str) -> Timeline:
    """A step of two stages, the layers of the second slow in their forward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Slow(), nn.Linear(4, 2))
    plan = plan_by_hand([str(index) for index in range(4)], [2], micro_batches=3)
    with Pipeline(model, on_devices(plan, devices), nn.MSELoss(), trace=True) as pipe:
        pipe.step(torch.randn(6, 4), target=torch.randn(6, 2))
        trace = pipe.last_trace
    assert trace is not None
    return trace


@pytest.mark.parametrize(
    ("devices", "lateness"),
    [(("vdev:0", "vdev:1"), None), (("vdev:0", "cpu"), 1.0), (("cpu", "vdev:1"), 1.0)],
)
def test_actions_and_messages_are_in_the_order_of_their_dependencies(devices, lateness):
    with vdev.delayed(1, lateness=lateness):
        trace = traced(*devices)
    assert [(t.kind, t.source, t.micro_batch, t.bytes) for t in trace.transfers if t.kind is Kind.F] == [
        (Kind.F, 0, micro_batch, 2 * 4 * 4) for micro_batch in range(3)
    ]
    slack = 0.05  # what two clocks may be apart on a busy machine; an action of another order is TIMER apart
    for transfer in trace.transfers:
        made, taken = (
            next(
                (starts[at], ends[at])
                for row, starts, ends in zip(trace.schedule.actions, trace.starts, trace.ends, strict=True)
                for at, action in enumerate(row)
                if (action.kind, action.stage, action.micro_batch)
                == (transfer.kind, stage, transfer.micro_batch)
            )
            for stage in (transfer.source, transfer.target)
        )
        assert made[1] == transfer.start <= transfer.end <= taken[0] + slack
    for starts, ends in zip(trace.starts, trace.ends, strict=True):
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))


def test_what_a_device_computes_is_its_busy_time():
    trace = traced("vdev:0", "vdev:1")
    assert trace.busy[1] >= 3 * TIMER


def test_untraced_steps_record_no_timed_events(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pipepart.runtime.transport.cuda.recorded", _untimed(torch.Event))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with cut_on(("vdev:0", "vdev:1"), model, [1], nn.MSELoss(), micro_batches=2) as pipe:
        pipe.step(torch.randn(4, 4), target=torch.randn(4, 2))
        assert pipe.last_trace is None


def _untimed(make):
    def recorded(stream, timed=False):
        assert not timed
        event = make(device=stream.device)
        event.record(stream)
        return event

    return recorded
