"""A model over two devices, with plain hand-overs, trains to the numbers of the CPU under any delay."""

import pytest
import torch
from torch import Tensor, nn

from tests.vdev import devices as vdev


def _halves() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten())
    return first, nn.Sequential(nn.Linear(216, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def _trained(first_device: str, second_device: str) -> list[Tensor]:
    first, second = _halves()
    first.to(first_device)
    second.to(second_device)
    steps = torch.optim.AdamW([*first.parameters(), *second.parameters()], 0.01)
    losses = []
    for _ in range(3):
        x, target = torch.randn(4, 3, 8, 8), torch.randint(4, (4,))
        hidden = first(x.to(first_device, non_blocking=True))
        y = second(hidden.to(second_device, non_blocking=True))
        loss = nn.functional.cross_entropy(y, target.to(second_device, non_blocking=True))
        steps.zero_grad()
        loss.backward()
        steps.step()
        losses.append(loss.detach())
    return [
        tensor.detach().cpu()
        for tensor in [*losses, *first.state_dict().values(), *second.state_dict().values()]
    ]


@pytest.mark.parametrize(("seed", "lateness"), [(0, None), (1, None), (2, 1.0)])
def test_two_devices_train_as_one(seed: int, lateness: float | None):
    expected = _trained("cpu", "cpu")
    with vdev.delayed(seed, lateness=lateness):
        found = _trained("vdev:0", "vdev:1")
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_backward_follows_the_streams_of_the_forward():
    torch.manual_seed(0)
    weight, x = torch.randn(16, 16), torch.randn(4, 16)
    plain = weight.clone().requires_grad_()
    (x @ plain).relu().sum().backward()
    assert plain.grad is not None
    for seed in range(6):
        there, given = weight.to("vdev:0").requires_grad_(), x.to("vdev:0")
        main, side = torch.accelerator.current_stream("vdev:0"), torch.Stream(device="vdev:0")
        with vdev.delayed(seed):
            y = given @ there
            side.wait_stream(main)
            with side:
                z = y.relu().sum()
            y.record_stream(side)
            main.wait_stream(side)
            z.backward()
            assert there.grad is not None
            assert torch.equal(there.grad.cpu(), plain.grad)
