"""Messages that all ranks take in one order, without tags, train to the bits of one process.

As NCCL does, over gloo: from the second step of a form on, each message goes by the communicator of its edge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_args
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import schedules
from pipepart.runtime.engine import Engine
from pipepart.runtime.transport import ordered
from schedules import Kind, Schedule
from schedules.communication.lowering import Lowering, lower
from schedules.communication.rendezvous import Queues, refuse_rendezvous_deadlock
from schedules.core.message import Message
from tests.distributed.test_chimera import steps as chimera
from tests.distributed.test_differentiable import in_replicas, over
from tests.distributed.test_losses import with_ignored_labels
from tests.distributed.test_models import hourglass, normalized, of_nests
from tests.distributed.test_schedules import in_any_order
from tests.distributed.training import TIMEOUT, drawn_batches, trained
from tests.pipeline.conformance.modes import SCHEDULES
from tests.support.chains import cut_by_hand
from tests.support.pieces import linear
from tests.support.ranks import assert_as_in_one_process, ranks

Case = Callable[..., Mapping[str, Any]]


def without_tags(case: Case, *args: Any) -> Mapping[str, Any]:
    """Run a case with messages in one order; that they were is checked."""
    before, sent = ordered.Ordered.send, []

    def send(self: ordered.Ordered, key: Any, buffers: Any) -> None:
        sent.append(key)
        before(self, key, buffers)

    with (
        mock.patch.object(ordered, "direct_backend", return_value="gloo"),
        mock.patch.object(ordered.Ordered, "send", send),
    ):
        found = case(*args)
    assert sent or not torch.distributed.is_initialized()
    return found


def repeated(schedule: tuple[str, int], processes: int) -> dict[str, Any]:
    """Steps of two forms, each several times: whole mini-batches and a short one."""
    name, chunks = schedule
    first, *others, last = (linear() for _ in range(9))
    last.weight = first.weight
    model = nn.Sequential(*[nn.Sequential(one, nn.Dropout(0.1)) for one in (first, *others)], last).double()
    pipe = cut_by_hand(
        model,
        [len(model) * stage // (processes * chunks) for stage in range(1, processes * chunks)],
        loss_fn=nn.MSELoss(),
        schedule=name,
        chunks=chunks,
        micro_batches=4,
        recompute="except-last",
        timeout=TIMEOUT,
    )
    return trained(pipe, drawn_batches([9, 9, 3, 9, 3, 9]), max_norm=0.1)


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("schedule", [one for one in SCHEDULES if one[1] <= 2], ids=str)
def test_every_schedule(schedule, processes):
    assert_as_in_one_process(without_tags, processes, repeated, schedule, processes)


@pytest.mark.parametrize(
    ("processes", "case", "args"),
    [
        (3, with_ignored_labels, ("ignored", "zb-h1")),
        (3, normalized, (True, "always")),
        (3, of_nests, ()),
        (4, hourglass, (4, "zb-h1", "never")),
        (4, in_any_order, (2, 4)),
        (4, chimera, (4, True, "never")),
        (2, over, ("zb-v", 2, "always", True, 2)),
        (4, in_replicas, ()),
    ],
)
def test_what_else_goes_between_ranks(processes, case, args):
    assert_as_in_one_process(without_tags, processes, case, *args)


def on_the_callers_thread(ordered_too: bool) -> Mapping[str, Any]:
    """Backwards that run on the thread of the caller, as on accelerators."""
    execute = Engine.execute

    def here(self: Engine, step: Any, scaled: bool = False, on_workers: bool = True) -> None:
        kinds = {action.kind for row in step.schedule.actions for action in row}
        execute(self, step, scaled, on_workers and Kind.F in kinds)

    with mock.patch.object(Engine, "execute", here):
        args = ("1f1b", 1, "always", True, 3)
        return without_tags(over, *args) if ordered_too else over(*args)


@pytest.mark.parametrize("ordered_too", [False, True])
def test_a_backward_on_the_callers_thread(ordered_too):
    assert_as_in_one_process(on_the_callers_thread, 3, ordered_too)


class FailsLater(nn.Module):
    """Raises in its fifth forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = linear(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 5:
            raise ValueError("on purpose")
        return self.linear(x)


def failing() -> dict[str, Any]:
    model = nn.Sequential(linear(), FailsLater(), linear()).double()
    x, y = drawn_batches([9])[0]
    with cut_by_hand(model, [1, 2], loss_fn=nn.MSELoss(), timeout=TIMEOUT) as pipe:
        pipe.step(x, target=y)
        with pytest.raises(Exception, match="on purpose") as raised:
            pipe.step(x, target=y)
        return {"error": type(raised.value).__name__}


def test_a_failure_ends_the_step_on_all_ranks():
    found = ranks(3).run(without_tags, failing)
    assert [one["error"] for one in found] == ["RankError", "ValueError", "RankError"]


def issued(schedule: Schedule) -> Lowering:
    """The messages of a schedule as each device begins them, which receives right before it needs a message."""
    lowered = lower(schedule)
    at: dict[Any, Message] = {}  # by the action that makes a message, and by those that need it
    for message in {one for order in lowered.orders for one in order}:
        source, target = message.stages
        kinds = [Kind.F] if message.kind is Kind.F else [Kind.B, Kind.I]
        at |= {(True, kind, source, message.micro_batch): message for kind in kinds}
        at |= {(False, kind, target, message.micro_batch): message for kind in kinds}
    events: dict[int, list[Any]] = {}
    for device, row in enumerate(schedule.actions):
        leaves = [leaf[:3] for action in row for leaf in action.leaves]
        steps = ((sends, (sends, *leaf)) for leaf in leaves for sends in (False, True))
        events[device] = [(sends, at[key]) for sends, key in steps if key in at]
    order = [key for key, *_ in ordered.one_order(events)]
    orders = [[one for one in order if device in one.ranks] for device in events]
    rows = []
    for device, row in enumerate(schedule.actions):
        left, mine = iter(orders[device]), []
        begun: set[Any] = set()
        for action in row:
            for leaf in action.leaves:
                for sends in (False, True):
                    wanted = at.get((sends, *leaf[:3]))
                    while wanted is not None and wanted not in begun:
                        begun.add(one := next(left))
                        mine.append(one)
                    mine += [] if sends else [leaf]
        rows.append(mine)
    return replace(lowered, rows=rows, orders=orders)


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("schedule", [one for one in SCHEDULES if one[0] != "chimera"], ids=str)
def test_unbuffered_messages_in_this_order_do_not_deadlock(schedule, devices):
    name, chunks = schedule
    lowering = issued(schedules.split_overlaps(schedules.build(name, devices, 2 * devices, chunks)))
    for queues in get_args(Queues):
        refuse_rendezvous_deadlock(lowering, queues)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("processes", [2, 4])
def test_random_orders(processes):
    for seed in range(40):
        assert_as_in_one_process(without_tags, processes, in_any_order, seed, processes)
