"""Pipelines on such devices: each stage has its own values there, and what streams still write is waited for."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipepart
from pipepart import Pipeline
from tests.support import plain
from tests.support.chains import on_devices, plan_by_hand
from tests.support.deferred import initialize, twins
from tests.support.on_devices import cut_on, gradients, sample
from tests.support.recorded import chain_for, plainly
from tests.vdev import devices as vdev
from tests.vdev.devices import delayed

DEVICES = "vdev:0", "vdev:1"


def six_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)]).double()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def trained(made: Any, count: int, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    for _ in range(count):
        made.step(x, target=y)
    return {name: value.cpu() for name, value in made.state_dict().items()}


@pytest.mark.parametrize(("asynchronous", "seed"), [(False, 0), (True, 1)])
def test_what_streams_still_write_is_waited_for(tmp_path: Path, asynchronous: bool, seed: int) -> None:
    x, y = sample(8, 16)
    with cut_on(DEVICES, six_layers(), [3], nn.MSELoss(), optimizer=adam) as pipe:
        middle, wanted = trained(pipe, 2, x, y), trained(pipe, 2, x, y)
    with delayed(seed=seed), cut_on(DEVICES, six_layers(), [3], nn.MSELoss(), optimizer=adam) as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
        pipepart.save(tmp_path, pipe, step=2, asynchronous=asynchronous)
        pipe.step(x, target=y)
    with delayed(seed=seed), cut_on(DEVICES, six_layers(), [2], nn.MSELoss(), optimizer=adam) as pipe:
        assert pipepart.load(tmp_path, pipe).step == 2
        assert all(value.cpu().equal(middle[name]) for name, value in pipe.state_dict().items())
        found = trained(pipe, 2, x, y)
    assert all(value.equal(wanted[name]) for name, value in found.items())


LOSS = nn.functional.cross_entropy


def model() -> nn.Sequential:
    made = nn.Sequential(
        nn.Embedding(20, 8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 20, bias=False)
    )
    made[3].weight = made[0].weight
    return made


@pytest.mark.parametrize("source", ["initialization", "file"])
def test_each_stage_is_on_its_device(source, tmp_path):
    plain, deferred = twins(model)
    options: dict[str, Any] = {"initialize": initialize}
    if source == "file":
        save_model = pytest.importorskip("safetensors.torch").save_model
        save_model(plain, str(tmp_path / "model.safetensors"))
        options = {"weights": tmp_path}
    assert isinstance(deferred, nn.Sequential)
    weight = deferred[0].weight
    plan = on_devices(
        plan_by_hand(["0", "1", "2", "3"], [1, 3], micro_batches=2), ("vdev:0", "vdev:1", "vdev:2")
    )
    x, y = torch.arange(8), torch.arange(8, 16)
    with Pipeline(deferred, plan, LOSS, **options) as pipe, Pipeline(plain, plan, LOSS) as other:
        assert deferred[0].weight is weight is deferred[3].weight
        places = {name: str(tensor.device) for name, tensor in pipe.state_dict().items()}
        assert places["0.weight"] == places["3.weight"] == "vdev:0"
        assert {places[name] for name in places if name[0] in "12"} == {"vdev:1"}
        for mine, its in zip(pipe.state_dict().values(), plain.state_dict().values(), strict=True):
            assert torch.equal(mine.cpu(), its.cpu())
        assert torch.equal(pipe.step(x, target=y).cpu(), other.step(x, target=y).cpu())


class Placed(nn.Module):
    """Makes tensors on the device of others between its blocks, and keeps a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.scale = nn.Parameter(torch.ones(6))
        self.table = torch.linspace(0.5, 1.5, 6)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        first = x
        for number, block in enumerate(self.blocks):
            x = torch.tanh(block(x)) * self.scale
            x = x + torch.arange(6, device=x.device) / 6 + torch.zeros_like(first) + number * mask
            x = x * self.table.to(x.device)
        return x + first


@pytest.mark.parametrize("length", [8, 5])
def test_devices_follow_the_stages(length):
    torch.manual_seed(0)
    model = Placed()
    plain = copy.deepcopy(model)
    x, mask, y = torch.randn(8, 6), torch.randn(8, 6).round(), torch.randn(8, 6)
    loss_fn = nn.functional.mse_loss
    chain = chain_for(model, (x, mask), loss_fn=loss_fn)
    names = [name for name, _ in chain.layers]
    plan = plan_by_hand(names, [1, 3], micro_batches=2)
    plan = on_devices(plan, ("vdev:0", "vdev:1", "vdev:2"))
    with Pipeline(chain, plan, loss_fn) as pipe:
        loss = pipe.step(x[:length], mask[:length], target=y[:length])
        assert {str(p.device) for p in model.parameters()} == {"vdev:0", "vdev:1", "vdev:2"}
    expected = plainly(plain, (x[:length], mask[:length]), target=y[:length], loss_fn=loss_fn)
    torch.testing.assert_close(loss.cpu(), expected)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.cpu(), other.grad)


class Again(nn.Module):
    """Uses the weight of another layer."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.weight = other.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_what_layers_share_they_share_when_they_were_moved():
    first = nn.Linear(4, 4)
    model = nn.Sequential(first, nn.Tanh(), Again(first), nn.Linear(4, 4)).double()
    reference = plain.twin(model)
    x, y = sample(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cut_on(("vdev:0", "vdev:1"), model, [2], nn.MSELoss()) as pipe:
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
    plain.assert_same(gradients(model), plain.gradients(reference))
    assert first.weight.device == torch.device("vdev:0")
    assert optimizer.param_groups[0]["params"][0] is first.weight


def test_a_parameter_that_a_graph_holds_is_refused():
    """On devices to which torch cannot move a parameter in place."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    graph = model(sample(8, 4)[0])
    with pytest.raises(
        RuntimeError, match="as a graph or a weak reference holds it: make the pipeline before"
    ):
        cut_on(("vdev:0", "vdev:1"), model, [2], nn.MSELoss())
    assert graph.requires_grad
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


def test_hooks_of_parameters_come_along():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    reference = plain.twin(model)
    seen: list[int] = []
    for one in (model, reference):
        one.get_parameter("0.weight").register_hook(lambda gradient: gradient * 3)
    model.get_parameter("2.weight").register_post_accumulate_grad_hook(lambda _: seen.append(2))
    removed = model.get_parameter("2.bias").register_hook(lambda gradient: gradient * 5)
    x, y = sample(8, 4)
    with cut_on(("vdev:0", "vdev:1"), model, [2], nn.MSELoss()) as pipe:
        removed.remove()
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
    plain.assert_same(gradients(model), plain.gradients(reference))
    assert seen == [2] * 4


def test_a_step_leaves_parameters_gradients_and_optimizer_state():
    gc.collect()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 32))
    parameters = [4 * (64 * 64 + 64), 4 * (64 * 2 + 64 * 32 + 32)]
    buffers = [0, 4 * 64 * 2 + 8]
    before = [vdev.memory(f"vdev:{index}").allocated for index in (0, 1)]

    def momentum(own: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(own, lr=0.1, momentum=0.9)

    def more() -> list[int]:
        return [vdev.memory(f"vdev:{index}").allocated - then for index, then in enumerate(before)]

    with cut_on(("vdev:0", "vdev:1"), model, [2], nn.MSELoss(), micro_batches=2, optimizer=momentum) as pipe:
        assert more() == [own + kept for own, kept in zip(parameters, buffers, strict=True)]
        for _ in range(2):
            pipe.step(torch.randn(8, 64), target=torch.randn(8, 32))
        gc.collect()
        expected = [3 * own + kept for own, kept in zip(parameters, buffers, strict=True)]
        assert all(0 <= found - known <= 64 for found, known in zip(more(), expected, strict=True)), more()


def test_stashes_on_the_host_leave_the_device():
    """Of twelve micro-batches, three stashes stay at most: the outputs of three Tanh, and the target. Inputs stay."""
    row, rows = 4 * 64, 64
    peaks = {}
    for offload in ("never", "stash"):
        gc.collect()
        model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())])
        with cut_on(
            ("vdev:0", "vdev:1"),
            model,
            [6],
            nn.MSELoss(),
            micro_batches=12,
            schedule="gpipe",
            offload=offload,
        ) as pipe:
            x, y = torch.randn(12 * rows, 64), torch.randn(12 * rows, 64)
            pipe.step(x, target=y)
            vdev.reset_peak("vdev:1")
            before = vdev.memory("vdev:1").allocated
            pipe.step(x, target=y)
            peaks[offload] = vdev.memory("vdev:1").peak - before
    assert peaks["never"] - peaks["stash"] == 9 * 4 * rows * row
