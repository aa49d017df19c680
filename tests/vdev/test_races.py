"""Programs that forget to wait are reported from one run in which nothing was late, and those that wait are not."""

import queue
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.vdev import hosts, races
from tests.vdev.races import NOT_YET, ON_HOST, STILL_USED, UNORDERED


@pytest.fixture(autouse=True)
def _tracked(_devices: None) -> Iterator[None]:
    with hosts.tracked():
        yield


def _streams() -> tuple[torch.Stream, torch.Stream]:
    return torch.accelerator.current_stream("vdev:0"), torch.Stream(device="vdev:0")


def _start() -> Tensor:
    x = torch.arange(64.0, device="vdev:0")
    torch.accelerator.synchronize("vdev:0")
    return x


def consumer_without_the_event_of_its_producer(right: bool) -> Tensor:
    x, (main, side) = _start(), _streams()
    y = torch.empty_like(x)
    side.wait_stream(main)
    with side:
        torch.mul(x, 2, out=y)
    if right:
        main.wait_event(side.record_event())
    return (y + 1).cpu()


def source_of_a_copy_freed_without_record_stream(right: bool) -> Tensor:
    x, (main, side) = _start(), _streams()
    source = x * 3
    side.wait_stream(main)
    with side:
        kept = source.clone()
    if right:
        source.record_stream(side)
    del source
    other = x - 7  # where the source was
    main.wait_stream(side)
    return (kept + other).cpu()


def copy_used_without_waiting_for_it(right: bool) -> Tensor:
    (main, side), on_host = _streams(), torch.arange(64.0).pin_memory()
    with side:
        x = on_host.to("vdev:0", non_blocking=True)
    if right:
        main.wait_stream(side)
    y = x * 2
    x.record_stream(main)
    return y.cpu()


def target_of_a_copy_freed_without_record_stream(right: bool) -> Tensor:
    (main, side), on_host = _streams(), torch.arange(64.0).pin_memory()
    total = torch.zeros(64, device="vdev:0")
    for number in range(8):
        given = (on_host + number).pin_memory()
        with side:
            x = given.to("vdev:0", non_blocking=True)  # where the last one was
        main.wait_stream(side)
        total += x * (number + 1)
        if right:
            x.record_stream(main)
        del x
    return total.cpu()


def host_read_of_a_copy_under_way(right: bool) -> Tensor:
    y = _start() * 2
    on_host = y.to("cpu", non_blocking=True)
    if right:
        torch.accelerator.current_stream("vdev:0").record_event().synchronize()
    return on_host.clone()


def pinned_source_written_while_it_is_copied(right: bool) -> Tensor:
    on_host = torch.arange(64.0).pin_memory()
    x = on_host.to("vdev:0", non_blocking=True)
    if right:
        torch.accelerator.synchronize("vdev:0")
    on_host.zero_()
    return x.cpu()


PROGRAMS: list[tuple[Callable[[bool], Tensor], Tensor, str, tuple[str, str]]] = [
    (consumer_without_the_event_of_its_producer, torch.arange(64.0) * 2 + 1, UNORDERED, ("mul", "add")),
    (source_of_a_copy_freed_without_record_stream, torch.arange(64.0) * 4 - 7, STILL_USED, ("copy_", "sub")),
    (copy_used_without_waiting_for_it, torch.arange(64.0) * 2, NOT_YET, ("alloc", "mul")),
    (
        target_of_a_copy_freed_without_record_stream,
        torch.arange(64.0) * 36 + 168,
        STILL_USED,
        ("mul", "copy_"),
    ),
    (host_read_of_a_copy_under_way, torch.arange(64.0) * 2, ON_HOST, ("copy_", "copy_")),
    (pinned_source_written_while_it_is_copied, torch.arange(64.0), ON_HOST, ("copy_", "zero_")),
]


@pytest.mark.parametrize(("program", "expected", "kind", "operations"), PROGRAMS)
def test_a_forgotten_wait_is_found_in_one_run(program, expected, kind, operations):
    with pytest.raises(races.RacesFound) as found, races.refused():
        assert torch.equal(program(False), expected)  # nothing is late, and the numbers are right
    first = next(race for race in found.value.races if race.kind == kind)
    for side, operation in zip((first.first, first.second), operations, strict=True):
        assert operation in side.operation
        assert program.__name__ in side.lines[0]
        assert __file__ in side.lines[0]
    with races.refused():
        assert torch.equal(program(True), expected)


@pytest.mark.parametrize("overlapping", [True, False])
def test_bytes_count_and_not_whole_blocks(overlapping: bool):
    (main, side), x = _streams(), torch.zeros(64, device="vdev:0")
    side.wait_stream(main)
    found: list[races.Race] = []
    with races.watched(found):
        x[:32].add_(1)
        with side:
            x[31 if overlapping else 32 :].add_(1)
    assert [race.kind for race in found] == ([UNORDERED] if overlapping else [])


@pytest.mark.parametrize("by_queue", [True, False])
def test_what_one_thread_has_waited_for_another_knows_from_a_queue_alone(by_queue: bool):
    (main, side), results = _streams(), queue.SimpleQueue[None]()
    x, found = torch.zeros(64, device="vdev:0"), list[races.Race]()

    def waits_and_tells() -> None:
        main.synchronize()
        if by_queue:
            results.put(None)

    with races.watched(found):
        x.add_(1)
        thread = threading.Thread(target=waits_and_tells)
        thread.start()
        thread.join()
        if by_queue:
            results.get()
        with side:
            x.add_(1)
    assert [race.kind for race in found] == ([] if by_queue else [UNORDERED])


@pytest.mark.parametrize("held", [True, False])
def test_calls_of_autograd_are_not_ordered_by_the_thread_that_runs_them(held: bool):
    """One thread of autograd frees what a second stream reads, behind allocations of another call that might follow."""
    streams = [torch.Stream(device="vdev:0") for _ in range(2)]
    outputs = []
    for stream in streams:
        with stream:
            outputs.append(torch.ones(64, device="vdev:0", requires_grad=True).exp().tanh())
    with streams[0]:
        gradients = [torch.ones(64, device="vdev:0")]
    torch.accelerator.synchronize("vdev:0")

    def differentiate(index: int) -> None:
        with streams[index]:
            gradient = gradients.pop() if index else torch.ones(64, device="vdev:0")
            if index and held:
                gradient.record_stream(streams[1])
            outputs.pop(0).backward(gradient)

    found: list[races.Race] = []
    with races.watched(found):
        for index in range(2):
            thread = threading.Thread(target=differentiate, args=(index,))
            thread.start()
            thread.join()
    assert {race.kind for race in found} == (set() if held else {STILL_USED})


def test_a_stream_that_is_asked_may_be_behind_once():
    (_, side), x = _streams(), _start()
    with races.refused():
        with side:
            x.add_(1)
        assert not side.query()
        assert side.query()  # the host knows now
        assert x.sum().item() == 64 * 63 / 2 + 64
