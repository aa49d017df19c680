"""Tensors live on one of several devices, as on a box of GPUs."""

import copy
import threading

import pytest
import torch
from torch import nn

from tests.vdev import devices as vdev


def test_tensors_of_two_devices_do_not_meet():
    with pytest.raises(
        RuntimeError,
        match="Expected all tensors to be on the same device, but found at least two devices, vdev:0 and vdev:1!",
    ):
        _ = torch.ones(3, device="vdev:0") + torch.ones(3, device="vdev:1")


def test_a_tensor_of_the_host_meets_none_of_a_device():
    with pytest.raises(RuntimeError, match="at least two devices, vdev:1 and cpu!"):
        nn.functional.linear(torch.ones(2, 3, device="vdev:1"), torch.ones(4, 3))


def test_nothing_is_written_to_a_number_of_the_host():
    with pytest.raises(RuntimeError, match="at least two devices, vdev:1 and cpu!"):
        torch.tensor(1.0).add_(torch.tensor(1.0, device="vdev:1"))


def test_an_index_of_the_host_is_read_by_any_device():
    table = torch.arange(6.0, device="vdev:2").view(3, 2)
    assert table[torch.tensor([2, 0])].tolist() == [[4.0, 5.0], [0.0, 1.0]]


def test_torch_finds_the_devices_until_they_are_hidden():
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 8
    assert torch.accelerator.current_accelerator() == torch.device("vdev")
    vdev.hide()
    assert not torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 0
    assert torch.ones(2, device="vdev:0").sum().item() == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.zeros(2, 3, device=device),
        lambda device: torch.full((2, 2), 7, device=device),
        lambda device: torch.arange(5, device=device),
        lambda device: torch.linspace(0, 1, 5, device=device),
        lambda device: torch.eye(3, device=device),
        lambda device: torch.tensor([[1, 2], [3, 4]], device=device),
        lambda device: torch.tril_indices(3, 3, device=device),
        lambda device: torch.ones(3, dtype=torch.bool, device=device),
        lambda device: torch.empty_strided((2, 3), (1, 2), device=device).fill_(2),
        lambda device: torch.zeros_like(torch.ones(2, device=device)),
        lambda device: torch.ones(2, device=device).new_full((3,), 4.0),
    ],
)
def test_factories_make_what_they_make_on_the_cpu(make):
    made = make("vdev:2")
    assert made.device == torch.device("vdev:2")
    assert torch.equal(made.cpu(), make("cpu"))
    assert made.stride() == make("cpu").stride()


def test_views_share_the_memory_of_their_base():
    base = torch.zeros(4, 6, device="vdev:1")
    base.view(2, 12)[0].fill_(1)
    base.t()[5].add_(2)
    base[:, 1:3].unsqueeze(0).mul_(3)
    expected = torch.zeros(4, 6)
    expected.view(2, 12)[0].fill_(1)
    expected.t()[5].add_(2)
    expected[:, 1:3].unsqueeze(0).mul_(3)
    assert torch.equal(base.cpu(), expected)
    assert base.view(24).untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


def test_a_storage_is_emptied_and_filled_again():
    weight = torch.ones(1000, device="vdev:6")
    assert vdev.memory("vdev:6").allocated == 4000
    weight.untyped_storage().resize_(0)
    assert vdev.memory("vdev:6").allocated == 0
    weight.untyped_storage().resize_(4000)
    assert weight.fill_(3).sum().item() == 3000


@pytest.mark.parametrize("non_blocking", [False, True])
def test_copies_between_devices_and_the_host_keep_values(non_blocking: bool):
    start = torch.randn(3, 4).pin_memory()
    there = start.to("vdev:0", non_blocking=non_blocking)
    across = there.to("vdev:1", non_blocking=non_blocking)
    back = across.t().to("cpu", torch.float64, non_blocking=non_blocking)
    torch.accelerator.synchronize("vdev:1")
    assert across.device == torch.device("vdev:1")
    assert torch.equal(back, start.t().double())


def test_pinned_memory_says_so():
    plain = torch.ones(3)
    pinned = plain.pin_memory()
    assert pinned.is_pinned()
    assert pinned[1:].is_pinned()
    assert not plain.is_pinned()
    assert torch.ones(3, device="vdev:0").to("cpu", non_blocking=True).is_pinned()


def test_a_deep_copy_stays_on_the_device():
    layer = nn.Linear(3, 2).to("vdev:2")
    other = copy.deepcopy(layer)
    assert other.weight.device == torch.device("vdev:2")
    assert other.weight.data_ptr() != layer.weight.data_ptr()
    assert torch.equal(other.weight, layer.weight)


def test_each_device_draws_from_its_own_generator():
    torch.manual_seed(3)
    first = torch.randn(4, device="vdev:0")
    second = torch.randn(4, device="vdev:1")
    torch.manual_seed(3)
    assert torch.equal(first.cpu(), torch.randn(4))
    assert torch.equal(first.cpu(), second.cpu())
    assert torch.equal(first.cpu(), torch.randn(4, device="vdev:0").cpu())
    assert not torch.equal(first.cpu(), torch.randn(4, device="vdev:0").cpu())


def test_backward_of_each_device_runs_on_a_thread_of_its_own():
    threads = {}

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, *grad_outputs):
            threads[grad_outputs[0].device.index] = threading.get_ident()
            return grad_outputs[0]

    x = torch.ones(2, device="vdev:0", requires_grad=True)
    Noting.apply(Noting.apply(x).to("vdev:1")).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1]
    assert len(set(threads.values())) == 2


def test_numbers_that_are_conjugated_or_negated_when_they_are_read():
    numbers = torch.randn(3, 2, dtype=torch.cdouble)
    there = numbers.to("vdev:0")
    assert there.conj().cpu().resolve_conj().equal(numbers.conj().resolve_conj())
    assert (there.conj() * 2).cpu().equal(numbers.conj() * 2)
    assert (there.conj().imag + 1).cpu().equal(numbers.conj().imag + 1)
    assert there.conj().to("vdev:1").cpu().resolve_conj().equal(numbers.conj().resolve_conj())
