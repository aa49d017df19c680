"""The devices count their memory to the byte, by category, and keep to a limit."""

import gc

import pytest
import torch
from torch import nn

from pipepart import faithful


@pytest.fixture(autouse=True)
def _empty():
    gc.collect()
    assert faithful.memory("vdev:0").allocated == 0
    faithful.reset_peak("vdev:0")


def test_bytes_are_counted_while_they_live():
    one = torch.empty(1000, device="vdev:0")
    two = torch.empty(10, dtype=torch.int64, device="vdev:0")
    view = one[:10]
    del one
    assert faithful.memory("vdev:0").allocated == 4080
    del view
    memory = faithful.memory("vdev:0")
    assert (memory.allocated, memory.peak) == (80, 4080)
    faithful.reset_peak("vdev:0")
    assert faithful.memory("vdev:0").peak == 80
    del two
    assert faithful.memory("vdev:0").allocated == 0


def test_results_of_kernels_are_counted():
    x = torch.ones(10, 20, device="vdev:0")
    y = x @ x.t()
    assert faithful.memory("vdev:0").allocated == 4 * (200 + 100)
    assert y[0, 0].item() == 20


def test_each_device_counts_its_own():
    before = faithful.memory("vdev:1").allocated
    kept = torch.zeros(8, device="vdev:1")
    assert faithful.memory("vdev:0").allocated == 0
    assert faithful.memory("vdev:1").allocated == before + kept.nbytes


def test_blocks_carry_the_category_of_their_allocation():
    with faithful.labelled("vdev:0", "parameters"):
        weight = torch.zeros(4, device="vdev:0")
        with faithful.labelled("vdev:0", "stash"):
            kept = torch.zeros(8, device="vdev:0")
        more = torch.zeros(2, device="vdev:0")
    rest = torch.zeros(1, device="vdev:0")
    assert _held("vdev:0") == {"parameters": 24, "stash": 32, "other": 4}
    del weight, kept, more, rest
    assert _held("vdev:0") == {}
    assert faithful.memory("vdev:0").peak_by_category["stash"] == 32


def test_a_category_holds_for_the_thread_of_autograd():
    layer = nn.Linear(4, 3).to("vdev:0")
    loss = layer(torch.ones(2, 4, device="vdev:0")).sum()
    with faithful.labelled("vdev:0", "gradients"):
        loss.backward()
    assert _held("vdev:0")["gradients"] == 4 * (12 + 3)


def test_a_tensor_changes_its_category():
    x = torch.zeros(6, device="vdev:0")
    faithful.relabel(x[2:], "gradients")
    assert _held("vdev:0") == {"gradients": 24}
    memory = faithful.memory("vdev:0")
    assert (memory.allocated, memory.peak) == (24, 24)
    with pytest.raises(RuntimeError, match="a tensor on cpu"):
        faithful.relabel(torch.zeros(1), "gradients")


def test_an_allocation_beyond_the_capacity_says_what_is_in_use():
    faithful.set_capacity("vdev:0", 4096)
    with faithful.labelled("vdev:0", "stash"):
        kept = torch.zeros(512, device="vdev:0")
    with pytest.raises(
        torch.OutOfMemoryError, match=r"allocate 2\.00 KiB.*4\.00 KiB.*2\.00 KiB of stash"
    ) as info:
        _ = torch.zeros(512, device="vdev:0"), torch.zeros(512, device="vdev:0")
    del info
    gc.collect()
    assert faithful.memory("vdev:0").allocated == 2048
    assert (kept[:256] + 1).sum().item() == 256


def test_the_result_of_a_kernel_may_be_what_does_not_fit():
    x = torch.ones(100, 1, device="vdev:0")
    faithful.set_capacity("vdev:0", 20_000)
    with pytest.raises(torch.OutOfMemoryError):
        _ = x @ x.t()
    assert faithful.memory("vdev:0").allocated == 400
    faithful.set_capacity("vdev:0", 40_404)
    assert (x @ x.t()).sum().item() == 10_000


def test_torch_reads_the_same_figures():
    kept = torch.zeros(100, device="vdev:0")
    torch.zeros(50, device="vdev:0")
    assert torch.accelerator.memory_allocated("vdev:0") == kept.nbytes
    assert torch.accelerator.max_memory_allocated("vdev:0") == 600


def _held(device: str) -> dict[str, int]:
    return {name: held for name, held in faithful.memory(device).by_category.items() if held}
