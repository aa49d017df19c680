"""Tensors live on one of several devices, as on a box of GPUs; memory is counted to the byte and limited."""

import gc

import pytest
import torch
from torch import nn

from tests.vdev import devices as vdev

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


def test_torch_finds_the_devices_until_they_are_hidden():
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 8
    assert torch.accelerator.current_accelerator() == torch.device("vdev")
    vdev.hide()
    assert not torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 0
    assert torch.ones(2, device="vdev:0").sum().item() == 2


def test_each_device_draws_from_its_own_generator():
    def drawn(device: str) -> list[float]:
        return torch.randn(4, device=device).tolist()

    torch.manual_seed(3)
    first, second = drawn("vdev:0"), drawn("vdev:1")
    torch.manual_seed(3)
    assert first == second == drawn("cpu") == drawn("vdev:0")
    assert first != drawn("vdev:0")


@pytest.fixture
def _empty():
    gc.collect()
    assert vdev.memory("vdev:0").allocated == 0
    vdev.reset_peak("vdev:0")


def in_use() -> tuple[int, int]:
    """The bytes in use, and the most; torch has the same figures."""
    memory = vdev.memory("vdev:0")
    assert torch.accelerator.memory_allocated("vdev:0") == memory.allocated
    assert torch.accelerator.max_memory_allocated("vdev:0") == memory.peak
    return memory.allocated, memory.peak


@pytest.mark.usefixtures("_empty")
def test_bytes_are_counted_while_they_live():
    one = torch.empty(1000, device="vdev:0")
    two = torch.empty(10, dtype=torch.int64, device="vdev:0")
    view = one[:10]
    del one
    assert in_use() == (4080, 4080)
    del view
    assert in_use() == (80, 4080)
    vdev.reset_peak("vdev:0")
    assert in_use() == (80, 80)
    two.untyped_storage().resize_(0)
    assert in_use() == (0, 80)
    two.untyped_storage().resize_(80)
    assert two.fill_(3).sum().item() == 30


@pytest.mark.usefixtures("_empty")
def test_an_allocation_or_the_result_of_a_kernel_beyond_the_capacity_says_what_is_in_use():
    vdev.set_capacity("vdev:0", 4096)
    kept = torch.ones(512, 1, device="vdev:0")
    with pytest.raises(torch.OutOfMemoryError, match=r"allocate 2\.00 KiB.*4\.00 KiB is in use") as info:
        _ = torch.zeros(512, device="vdev:0"), torch.zeros(512, device="vdev:0")
    del info
    gc.collect()
    with pytest.raises(torch.OutOfMemoryError):
        _ = kept[:100] @ kept[:100].t()
    assert in_use()[0] == 2048
    vdev.set_capacity("vdev:0", 2048 + 40_004)
    assert (kept[:100] @ kept[:100].t()).sum().item() == 10_000


def test_autocast_casts_by_the_lists_of_cuda():
    layer, x = nn.Linear(8, 4), torch.randn(3, 8)
    expected = nn.functional.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())
    with torch.autocast("vdev", dtype=torch.bfloat16):
        y = layer.to("vdev:0")(x.to("vdev:0"))
        assert y.softmax(-1).dtype == torch.float32
    assert torch.equal(y.cpu(), expected)
