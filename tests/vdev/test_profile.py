"""Profiles on devices that run late time the device's work, and need room for one layer only."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pipepart
from tests.vdev import devices as vdev

pytestmark = pytest.mark.usefixtures("short_profiles")


class Busy(nn.Module):
    """Multiplies by a matrix ``rounds`` times."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds
        self.register_buffer("matrix", torch.eye(128))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.rounds):
            x = x @ self.get_buffer("matrix")
        return x


def test_layers_are_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[torch.device] = []
    wait = torch.accelerator.synchronize

    def counted(device: torch.device) -> None:
        waits.append(device)
        wait(device)

    monkeypatch.setattr(torch.accelerator, "synchronize", counted)
    model = nn.Sequential(nn.Linear(128, 128), Busy(2), Busy(200)).to("vdev:0")
    x = torch.randn(128, 128, device="vdev:0")
    profile = pipepart.profile(model, x, loss_fn=nn.MSELoss(), target=torch.zeros_like(x), seconds=0)
    costs = profile.costs[0]
    assert (profile.device, profile.threads) == ("vdev:0", None)
    assert len(waits) == costs.repeats
    linear, short, long = costs.layers
    assert long.forward.seconds > short.forward.seconds > 0
    assert long.backward_input.seconds > short.backward_input.seconds > 0
    assert linear.backward_seconds > 0
    assert (linear.saved_bytes, short.saved_bytes) == (x.nbytes, 0)


WIDTH, LAYERS = 256, 10
WEIGHT = 4 * WIDTH * WIDTH
ROOM = 8 * WEIGHT  # for a layer, its gradient, and what it computes


class Blocks(nn.Module):
    """Puts tensors on the device of others between its blocks, keeps a plain tensor, and computes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.table = torch.linspace(0.5, 1.5, WIDTH)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.table.to(x.device) + torch.arange(WIDTH, device=x.device)
        return nn.functional.cross_entropy(x, labels.to(x.device))


def sequential() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)), nn.Dropout())


@pytest.mark.parametrize(("make", "home"), [(sequential, "meta"), (Blocks, "cpu")])
def test_room_for_one_layer_is_enough(make: Callable[[], nn.Module], home: str) -> None:
    with torch.device(home):
        model = make()
    ids = [id(parameter) for parameter in model.parameters()]
    x, labels = torch.randn(8, WIDTH), torch.randint(WIDTH, (8,))
    sample = x if make is sequential else (x, labels)
    loss = {"loss_fn": nn.CrossEntropyLoss(), "target": labels} if make is sequential else {}
    vdev.set_capacity("vdev:0", ROOM)
    with pytest.raises(torch.OutOfMemoryError):
        make().to("vdev:0")
    vdev.reset_peak("vdev:0")
    profile = pipepart.profile(model, sample, device="vdev:0", seconds=0, progress=False, **loss)
    assert WEIGHT < vdev.memory("vdev:0").peak <= ROOM
    assert {parameter.device.type for parameter in model.parameters()} == {home}
    assert [id(parameter) for parameter in model.parameters()] == ids
    assert (profile.device, profile.threads) == ("vdev:0", None)
    costs = profile.costs[0]
    assert all(cost.forward.seconds > 0 and cost.backward_seconds > 0 for cost in costs.layers)
    assert costs.loss.forward.seconds > 0


def test_the_random_state_of_the_device_is_restored() -> None:
    before = torch.get_device_module("vdev").get_rng_state(0)
    pipepart.profile(sequential(), torch.randn(8, WIDTH), device="vdev:0", seconds=0, progress=False)
    assert torch.get_device_module("vdev").get_rng_state(0).equal(before)
