"""Streams and events order the work of a device, late or at once."""

import pytest
import torch
from torch import nn

from tests.vdev import devices as vdev

LATE = 1.0  # a stream runs only when something waits for it


def test_a_late_stream_has_not_run_until_it_is_waited_for():
    """By an event, or by the host that reads from it; fresh memory is no number until it is written."""
    side, x = torch.Stream(device="vdev:0"), torch.zeros(3, device="vdev:0")
    with vdev.delayed(lateness=LATE):
        with side:
            y = torch.ones(3, device="vdev:0")
        assert torch.empty(3, device="vdev:0").isnan().all().item()
        assert not side.query()
        first, last = (torch.Event(device="vdev:0", enable_timing=True) for _ in range(2))
        first.record()
        x.add_(1)
        last.record()
        with pytest.raises(RuntimeError, match="must be completed"):
            first.elapsed_time(last)
        assert not last.query()
        last.synchronize()
        assert first.query()
        assert first.elapsed_time(last) >= 0
        assert x.tolist() == [1, 1, 1]
        assert y.shape == (3,)
        torch.accelerator.synchronize("vdev:0")
        assert side.query()


def test_an_event_is_waited_for_as_it_was_recorded_last_before():
    side, x = torch.Stream(device="vdev:0"), torch.zeros(3, device="vdev:0")
    with vdev.delayed(lateness=LATE):
        event = torch.Event(device="vdev:0")
        with side:
            x.add_(1)
            event.record()
        torch.accelerator.current_stream("vdev:0").wait_event(event)
        with side:
            event.record()
        y = x * 1
        assert y.tolist() == [1, 1, 1]
        assert not side.query()  # its second record has not run


def test_what_has_no_shape_before_its_values_is_waited_for():
    x = torch.zeros(4, device="vdev:0")
    with vdev.delayed(lateness=LATE):
        x[2] += 1
        assert x.nonzero().tolist() == [[2]]
        assert x[x > 0].tolist() == [1]
        assert torch.equal(x, x.clone())


def test_random_numbers_are_drawn_in_the_order_of_launches():
    def numbers() -> list[float]:
        torch.manual_seed(7)
        side = torch.Stream(device="vdev:0")
        with side:
            first = torch.rand(3, device="vdev:0")
        second = nn.functional.dropout(torch.ones(8, device="vdev:0"), 0.5)
        chosen = torch.multinomial(torch.ones(5, device="vdev:0"), 3)
        third = torch.randperm(6, device="vdev:0")
        torch.accelerator.synchronize("vdev:0")
        return [*first.tolist(), *second.tolist(), *chosen.tolist(), *third.tolist()]

    expected = numbers()
    for seed in range(8):
        with vdev.delayed(seed):
            assert numbers() == expected


def test_pinned_memory_is_read_late_and_other_memory_and_numbers_at_the_launch():
    plain, pinned, factor = torch.ones(3), torch.ones(3).pin_memory(), torch.tensor(2.0)
    with vdev.delayed(lateness=LATE):
        doubled = torch.ones(3, device="vdev:0") * factor
        factor.fill_(100)
        assert doubled.tolist() == [2, 2, 2]
        one = plain.to("vdev:0", non_blocking=True)
        other = pinned.to("vdev:0", non_blocking=True)
        plain.fill_(7)
        pinned.fill_(7)
        assert one.tolist() == [1, 1, 1]
        assert other.tolist() == [7, 7, 7]


def test_values_that_do_not_fit_are_told_at_the_next_wait():
    table = torch.ones(3, 2, device="vdev:0")
    with vdev.delayed(lateness=LATE):
        found = nn.functional.embedding(torch.tensor([5], device="vdev:0"), table)
        with pytest.raises(IndexError, match="index out of range"):
            torch.accelerator.synchronize("vdev:0")
        assert found.shape == (1, 2)
        assert table.sum().item() == 6  # the device goes on


def test_freed_memory_is_handed_out_again_on_its_stream_and_when_others_that_use_it_have_run():
    side, x = torch.Stream(device="vdev:0"), torch.zeros(100, device="vdev:0")
    with vdev.delayed(lateness=LATE):
        one = torch.empty(100, device="vdev:0")
        address = one.data_ptr()
        del one
        with side:
            assert torch.empty(100, device="vdev:0").data_ptr() != address
        one = torch.empty(90, device="vdev:0")
        assert one.data_ptr() == address
        with side:
            x.add_(1)
        one.record_stream(side)
        del one
        assert torch.empty(100, device="vdev:0").data_ptr() != address
        side.synchronize()
        two = torch.empty(100, device="vdev:0")
        three = torch.empty(100, device="vdev:0")
        assert address in (two.data_ptr(), three.data_ptr())


def test_short_of_memory_the_host_waits_for_blocks_in_use():
    side, x = torch.Stream(device="vdev:7"), torch.zeros(100, device="vdev:7")
    vdev.set_capacity("vdev:7", 900)
    with vdev.delayed(lateness=LATE):
        one = torch.empty(100, device="vdev:7")
        with side:
            x.add_(1)
        one.record_stream(side)
        del one
        two = torch.empty(100, device="vdev:7")
        assert side.query()
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(100, device="vdev:7")
        assert two.fill_(1).sum().item() == 100


def test_a_seed_gives_the_same_course_again():
    def course() -> list[bool]:
        seen = []
        streams = [torch.Stream(device=f"vdev:{index % 2}") for index in range(4)]
        x = [torch.zeros(2, device=stream.device) for stream in streams]
        with vdev.delayed(seed=5):
            for step in range(40):
                with streams[step % 4]:
                    x[step % 4].add_(1)
                seen.append(streams[(step * 7) % 4].query())
        return seen

    expected = course()
    assert 0 < sum(expected) < 40
    assert course() == expected
