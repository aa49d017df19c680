"""Streams and events order the work of a device, late or at once; tensors of two devices do not meet."""

import pytest
import torch
from torch import nn

from tests.vdev import devices as vdev

LATE = 1.0  # a stream runs only when something waits for it

MIXED = {
    "vdev:0 and vdev:1": lambda: torch.ones(3, device="vdev:0") + torch.ones(3, device="vdev:1"),
    "vdev:1 and cpu": lambda: nn.functional.linear(torch.ones(2, 3, device="vdev:1"), torch.ones(4, 3)),
    "vdev:1 and cpu!": lambda: torch.tensor(1.0).add_(torch.tensor(1.0, device="vdev:1")),
}


@pytest.mark.parametrize("places", MIXED)
def test_tensors_of_two_devices_do_not_meet(places):
    with pytest.raises(
        RuntimeError, match=f"same device, but found at least two devices, {places.rstrip('!')}!"
    ):
        MIXED[places]()


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
