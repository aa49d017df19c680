"""The devices count their memory to the byte and enforce a limit."""

import gc

import pytest
import torch

from tests.vdev import devices as vdev


@pytest.fixture(autouse=True)
def _empty():
    gc.collect()
    assert vdev.memory("vdev:0").allocated == 0
    vdev.reset_peak("vdev:0")


def test_bytes_are_counted_while_they_live():
    one = torch.empty(1000, device="vdev:0")
    two = torch.empty(10, dtype=torch.int64, device="vdev:0")
    view = one[:10]
    del one
    assert vdev.memory("vdev:0").allocated == 4080
    del view
    memory = vdev.memory("vdev:0")
    assert (memory.allocated, memory.peak) == (80, 4080)
    vdev.reset_peak("vdev:0")
    assert vdev.memory("vdev:0").peak == 80
    del two
    assert vdev.memory("vdev:0").allocated == 0


def test_an_allocation_beyond_the_capacity_says_what_is_in_use():
    vdev.set_capacity("vdev:0", 4096)
    kept = torch.zeros(512, device="vdev:0")
    with pytest.raises(torch.OutOfMemoryError, match=r"allocate 2\.00 KiB.*4\.00 KiB is in use") as info:
        _ = torch.zeros(512, device="vdev:0"), torch.zeros(512, device="vdev:0")
    del info
    gc.collect()
    assert vdev.memory("vdev:0").allocated == 2048
    assert (kept[:256] + 1).sum().item() == 256


def test_the_result_of_a_kernel_may_be_what_does_not_fit():
    x = torch.ones(100, 1, device="vdev:0")
    vdev.set_capacity("vdev:0", 20_000)
    with pytest.raises(torch.OutOfMemoryError):
        _ = x @ x.t()
    assert vdev.memory("vdev:0").allocated == 400
    vdev.set_capacity("vdev:0", 40_404)
    assert (x @ x.t()).sum().item() == 10_000


def test_torch_reads_the_same_figures():
    kept = torch.zeros(100, device="vdev:0")
    torch.zeros(50, device="vdev:0")
    assert torch.accelerator.memory_allocated("vdev:0") == kept.nbytes
    assert torch.accelerator.max_memory_allocated("vdev:0") == 600
