"""Programs that forget to wait get wrong numbers in delay mode under most seeds, and right ones where they wait."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.vdev import devices as vdev

SEEDS = range(24)


def _streams() -> tuple[torch.Stream, torch.Stream]:
    return torch.accelerator.current_stream("vdev:0"), torch.Stream(device="vdev:0")


def _start() -> Tensor:
    x = torch.arange(64.0, device="vdev:0")
    torch.accelerator.synchronize("vdev:0")
    return x


def consumer_without_the_event_of_its_producer(right: bool) -> Tensor:
    x, (main, side) = _start(), _streams()
    with side:
        y = x * 2
    if right:
        main.wait_event(side.record_event())
    z = y + 1
    y.record_stream(main)
    return z.cpu()


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


PROGRAMS: list[tuple[Callable[[bool], Tensor], Tensor]] = [
    (consumer_without_the_event_of_its_producer, torch.arange(64.0) * 2 + 1),
    (source_of_a_copy_freed_without_record_stream, torch.arange(64.0) * 4 - 7),
    (copy_used_without_waiting_for_it, torch.arange(64.0) * 2),
    (target_of_a_copy_freed_without_record_stream, torch.arange(64.0) * 36 + 168),
    (host_read_of_a_copy_under_way, torch.arange(64.0) * 2),
]


def _wrong(program: Callable[[bool], Tensor], right: bool, expected: Tensor) -> int:
    """The number of seeds under which the program gets other numbers."""
    wrong = 0
    for seed in SEEDS:
        with vdev.delayed(seed):
            wrong += not torch.equal(program(right), expected)
    return wrong


@pytest.mark.parametrize(("program", "expected"), PROGRAMS)
def test_a_forgotten_wait_shows_under_most_seeds_and_nowhere_else(
    program: Callable[[bool], Tensor], expected: Tensor
):
    assert _wrong(program, False, expected) > len(SEEDS) / 2
    assert _wrong(program, True, expected) == 0
    assert torch.equal(program(False), expected)  # where nothing is late
