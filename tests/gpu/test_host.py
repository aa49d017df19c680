"""Within a step the host never waits for a GPU, and each GPU uses as much memory as the plan predicts."""

import gc
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import nn

import pipepart
from tests.gpu.late import Late, borders, late_chain
from tests.support.on_devices import cut_on
from tests.support.plain import sample

pytestmark = pytest.mark.usefixtures("short_profiles")


@pytest.fixture
def no_waits() -> Iterator[None]:
    """Raises where an operation has the host wait, on whatever thread; switched on by the test."""
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("no_waits")
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize(
    ("schedule", "recompute"), [("gpipe", "never"), ("1f1b", "always"), ("zb-h1", "never")]
)
def test_no_operation_has_the_host_wait(devices, schedule, recompute, called):
    """After the first steps, in which libraries set themselves up and layers are looked at."""
    model = late_chain(len(devices))
    with cut_on(
        devices, model, borders(len(devices)), nn.MSELoss(), schedule=schedule, recompute=recompute
    ) as pipe:
        x, y = sample(16, 64)
        x, y = x.to(devices[0]), y.to(devices[-1])

        def step() -> torch.Tensor:
            if not called:
                return pipe.step(x, target=y)
            loss = pipe(x).square().sum()
            loss.backward()
            return loss.detach()

        for _ in range(3):
            step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        loss = step()
        torch.cuda.set_sync_debug_mode("default")
        assert torch.isfinite(loss).item()


def test_a_step_returns_before_the_devices_are_done():
    model = late_chain(2)
    for late in model:
        if isinstance(late, Late):
            late.cycles *= 20  # far longer than the host takes for what is behind the last of them
    with cut_on(("cuda:0", "cuda:0"), model, borders(2), nn.MSELoss()) as pipe:
        x, y = sample(16, 64)
        x, y = x.cuda(), y.cuda()
        pipe.step(x, target=y)
        torch.cuda.synchronize()
        pipe.step(x, target=y)
        assert not torch.cuda.current_stream().query()
        torch.cuda.synchronize()
        assert torch.cuda.current_stream().query()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_device_holds_what_the_plan_says(devices, schedule):
    """Within a tenth, what libraries keep for themselves left out; the input counts, as the first layer saves it.

    Of workers that share a device it is the sum, and what they hold for a while they do not all hold at once.
    """
    layers = [part for _ in range(8) for part in (nn.Linear(1024, 1024), nn.GELU())]
    model = nn.Sequential(*layers)
    x, y = torch.randn(1024, 1024, device="cuda:0"), torch.randn(1024, 1024, device="cuda:0")
    profile = pipepart.profile(
        model.cuda(), x, loss_fn=nn.MSELoss(), target=y, micro_batches=8, optimizer="sgd"
    )
    plan = pipepart.plan(profile, pipepart.Cluster.of(devices), schedule=schedule, micro_batches=8)
    assert plan.prediction is not None
    predicted: dict[str, int] = {}
    for device, held in zip(plan.workers, plan.prediction.memory_bytes, strict=True):
        assert device.torch_device is not None
        predicted[device.torch_device] = predicted.get(device.torch_device, 0) + held
    with pipepart.Pipeline(model, plan, nn.MSELoss()) as pipe:
        x, y = x.to(devices[0]), y.to(devices[-1])
        pipe.step(x, target=y)
        torch.cuda.synchronize()
        gc.collect()
        for device in predicted:
            torch.cuda.reset_peak_memory_stats(device)
        pipe.step(x, target=y)
        torch.cuda.synchronize()
        peaks = {device: torch.cuda.max_memory_allocated(device) for device in predicted}
        workspaces = _workspaces(predicted)
        least = 1 / 1.1 if len(predicted) == len(devices) else 0.75
        for device, held in predicted.items():
            found = peaks[device] - workspaces[device] - (y.nbytes if device == str(y.device) else 0)
            assert held * least <= found <= held * 1.1, (device, found, held)


def _workspaces(devices: Iterable[str]) -> dict[str, int]:
    """What cuBLAS has allocated on each device, for each stream that it was used on."""
    before = {device: torch.cuda.memory_allocated(device) for device in devices}
    torch._C._cuda_clearCublasWorkspaces()
    return {device: held - torch.cuda.memory_allocated(device) for device, held in before.items()}
