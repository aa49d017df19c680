"""Each wait and each hold of the streams is needed: without it, some accesses to memory have no order."""

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import schedules
from pipepart.runtime.engine import Engine
from pipepart.runtime.transport import cuda
from pipepart.runtime.transport.cuda import Streams
from pipepart.runtime.transport.pinned import PinnedCopies
from pipepart.workers.streams import Wait, Waits, waits
from tests.support.late_scenarios import SCENARIOS
from tests.vdev import devices as vdev
from tests.vdev import races
from tests.vdev.races import RacesFound

# The devices are compiled at their first use on a machine.
pytestmark = [pytest.mark.usefixtures("late_devices"), pytest.mark.timeout(600)]

SHOWS_IN = [
    (Wait.STEP_BEHIND_CALLER, "shared steps"),
    (Wait.STEP_BEHIND_CALLER, "inputs elsewhere"),
    (Wait.CALLER_BEHIND_STEP, "shared steps"),
    (Wait.CALLER_BEHIND_STEP, "targets elsewhere"),
    (Wait.ORDER_OF_GRADIENTS, "input of replicas"),
    (Wait.ORDER_OF_GRADIENTS, "input made on another stream"),
    (Wait.HELD_FOR_CALLER, "outputs that another thread frees"),
    (Wait.HELD_FOR_CALLER, "input gradients on several streams"),
    (Wait.HELD_FOR_CALLER, "evaluated aside"),
    (Wait.HELD_FOR_CALLER, "evaluated aside with losses of layers"),
    (Wait.COPY_BEHIND_COMPUTE, "steps"),
    (Wait.HELD_FOR_COPY, "forwards"),
    (Wait.FETCH_BEHIND_COMPUTE, "skipping forwards"),
    (Wait.HELD_FOR_FETCH, "skipping forwards"),
    (Wait.HOST_BEHIND_COPY, "steps to the CPU"),
    (Wait.COMPUTE_BEHIND_COPY, "steps"),
    (Wait.COMPUTE_BEHIND_COPY, "shared steps"),
    (Wait.HELD_FOR_COMPUTE, "forwards"),
    (Wait.HELD_FOR_COMPUTE, "shared forwards"),
    (Wait.HOST_BEHIND_PINNED, "pinned and written"),
    (Wait.CALLER_BEHIND_PINNED, "pinned steps"),
    (Wait.HELD_FOR_STEP, "pinned steps"),
    (Wait.OFFLOAD_BEHIND_COMPUTE, "offloaded steps"),
    (Wait.COMPUTE_BEHIND_OFFLOAD, "offloaded steps"),
    (Wait.COMPUTE_BEHIND_OFFLOAD, "offloaded shared steps"),
    (Wait.RELOAD_BEHIND_COMPUTE, "offloaded steps"),
    (Wait.COMPUTE_BEHIND_RELOAD, "offloaded steps"),
    (Wait.COMPUTE_BEHIND_RELOAD, "offloaded shared steps"),
]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_access_has_its_order_with_all_of_them(scenario):
    SCENARIOS[scenario]()


@pytest.mark.parametrize(("wait", "scenario"), SHOWS_IN)
def test_one_that_is_left_out_is_found_in_one_run(monkeypatch, wait, scenario):
    monkeypatch.setattr(waits, "left_out", frozenset({wait}))
    with pytest.raises(RacesFound):
        SCENARIOS[scenario]()


def test_each_wait_and_each_hold_is_tried():
    assert {wait for wait, _ in SHOWS_IN} == set(Wait) - {Wait.PACE}  # which holds up the host only


@pytest.mark.parametrize(
    ("scenario", "held", "worker", "call"),
    [
        ("shared steps", Wait.HELD_FOR_COMPUTE, "#0", 0),
        ("shared steps", Wait.HELD_FOR_COMPUTE, "#0", 6),
        ("shared steps", Wait.HELD_FOR_COMPUTE, "#1", 3),
        ("skipping forwards", Wait.HELD_FOR_FETCH, "vdev:2", 3),
    ],
)
def test_a_single_hold_that_is_left_out_is_found_in_one_run(monkeypatch, scenario, held, worker, call):
    """Two workers of a device have their backwards on one thread of autograd, which is no order of them."""
    hold, calls = Waits.hold, iter(range(100))

    def hold_others(waits: Waits, place: Wait, tensor: Tensor, stream: torch.Stream) -> None:
        by_worker = threading.current_thread().name.endswith(worker)
        if not (place is held and by_worker and next(calls) == call):
            hold(waits, place, tensor, stream)

    monkeypatch.setattr(Waits, "hold", hold_others)
    with pytest.raises(RacesFound):
        SCENARIOS[scenario]()
    assert next(calls) > call


@pytest.mark.parametrize("overlapping", [True, False])
def test_bytes_count_and_not_whole_blocks(overlapping: bool):
    side, x = torch.Stream(device="vdev:0"), torch.zeros(64, device="vdev:0")
    side.wait_stream(torch.accelerator.current_stream("vdev:0"))
    found: list[races.Race] = []
    with races.watched(found):
        x[:32].add_(1)
        with side:
            x[31 if overlapping else 32 :].add_(1)
    assert [race.kind for race in found] == ([races.UNORDERED] if overlapping else [])


def test_workers_are_on_streams_of_their_own(monkeypatch):
    monkeypatch.setattr(Streams, "entered", lambda *_: nullcontext())
    with pytest.raises(RacesFound):
        SCENARIOS["zeroed aside"]()


def test_a_thread_of_autograd_is_on_the_streams_of_the_workers_that_it_stands_for(monkeypatch):
    entered = Streams.entered

    def on_workers_alone(streams: Streams, worker: int) -> AbstractContextManager[None]:
        on_worker = threading.current_thread().name.startswith("pipepart")
        return entered(streams, worker) if on_worker else nullcontext()

    monkeypatch.setattr(Streams, "entered", on_workers_alone)
    with pytest.raises(RacesFound):
        SCENARIOS["recomputed aside"]()


def test_a_backward_on_a_thread_of_autograd_ends_on_the_streams_of_that_too(monkeypatch):
    begun: list[Mapping[Any, Any]] = []
    begin, end = Streams.begin, Streams.end

    def begin_and_note(streams: Streams, callers: cuda.Callers) -> None:
        begun.append(callers)
        begin(streams, callers)

    def end_for_the_same(streams: Streams, callers: cuda.Callers) -> None:
        if any(callers is one for one in begun):
            end(streams, callers)

    monkeypatch.setattr(Streams, "begin", begin_and_note)
    monkeypatch.setattr(Streams, "end", end_for_the_same)
    with pytest.raises(RacesFound):
        SCENARIOS["input gradients"]()


def test_a_backward_has_a_leaf_on_each_device(monkeypatch):
    everywhere = Engine.devices.fget
    assert everywhere is not None
    monkeypatch.setattr(Engine, "devices", property(lambda engine: everywhere(engine)[:1]))
    with pytest.raises(RacesFound):
        SCENARIOS["differentiated aside"]()


def test_a_scale_is_made_by_the_caller(monkeypatch):
    scale, calls = torch.amp.GradScaler.scale, []

    def scale_later(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        calls.append(scaler)
        return outputs if calls.count(scaler) == 1 else scale(scaler, outputs)

    monkeypatch.setattr(torch.amp.GradScaler, "scale", scale_later)

    def several_runs() -> None:
        for _ in range(5):  # a worker that reads the scale long after the other one made it shows no race
            SCENARIOS["scaled replicas"]()

    with pytest.raises(RacesFound):
        several_runs()


def test_pinned_mini_batches_are_copied_while_the_step_before_is_computed():
    home = torch.device("vdev:0")
    copies = PinnedCopies([home], [0])
    x = torch.arange(4.0)
    weight = torch.ones(4, device=home)
    with vdev.delayed(lateness=1.0):
        computed = (weight * 2).to("cpu", non_blocking=True)
        copied = copies.inputs(schedules.build("gpipe", devices=1, micro_batches=1), [x.pin_memory()])
        copies.wait()
        assert computed.isnan().all()
        assert (copied[0] * weight).cpu().equal(x)


def test_the_host_queues_some_actions_ahead_of_the_device_and_no_more():
    numbers = torch.arange(20.0, device="vdev:0")
    seen: list[Tensor] = []
    own = Streams([torch.device("vdev:0")])
    own.begin(own.callers())

    def do(action: int) -> None:
        if action >= 4:
            assert seen[action - 4] == action - 4
        if action:
            assert seen[-1].isnan()
        seen.append((numbers[action] * 1).to("cpu", non_blocking=True))

    with vdev.delayed(lateness=1.0), own.entered(0):
        pace = own.pace(0)
        assert pace is not None
        for action in range(20):
            pace.wait()
            do(action)
            pace.queued()
    assert len(seen) == 20
