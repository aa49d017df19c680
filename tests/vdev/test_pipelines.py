"""Pipelines, profiles and traces on devices that run late: what streams still write is waited for, and timed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipepart
from pipepart import Pipeline
from schedules import Kind, Timeline
from tests.support import plain
from tests.support.chains import cut_by_hand, on_devices, plan_by_hand
from tests.support.deferred import initialize, twins
from tests.support.on_devices import THREE, TWO, cut_on, gradients
from tests.support.recorded import chain_for, plainly
from tests.support.two_parts import Calls
from tests.vdev import devices as vdev
from tests.vdev.devices import delayed

pytestmark = pytest.mark.usefixtures("short_profiles")


LOSS = nn.MSELoss()
MIXED = {
    "vdev:0 and vdev:1": lambda: torch.ones(3, device="vdev:0") + torch.ones(3, device="vdev:1"),
    "vdev:1 and cpu": lambda: nn.functional.linear(torch.ones(2, 3, device="vdev:1"), torch.ones(4, 3)),
}


@pytest.mark.parametrize("places", MIXED)
def test_tensors_of_two_devices_do_not_meet(places):
    with pytest.raises(RuntimeError, match=f"same device, but found at least two devices, {places}!"):
        MIXED[places]()


def six_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return plain.in_double(nn.Linear(16, 16) for _ in range(6))


def three_layers() -> nn.Sequential:
    return plain.in_double([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)])


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def trained(made: Any, count: int, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    for _ in range(count):
        made.step(x, target=y)
    return {name: value.cpu() for name, value in made.state_dict().items()}


@pytest.mark.parametrize("seed", [0, 1])
def test_what_streams_still_write_is_waited_for(tmp_path: Path, seed: int) -> None:
    x, y = plain.sample(8, 16)
    with cut_on(TWO, six_layers(), [3], LOSS, optimizer=adam) as pipe:
        middle, wanted = trained(pipe, 2, x, y), trained(pipe, 2, x, y)
    with delayed(seed=seed), cut_on(TWO, six_layers(), [3], LOSS, optimizer=adam) as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
        pipepart.save(tmp_path, pipe, step=2)
        pipe.step(x, target=y)
    with delayed(seed=seed), cut_on(TWO, six_layers(), [2], LOSS, optimizer=adam) as pipe:
        assert pipepart.load(tmp_path, pipe).step == 2
        plain.assert_same(trained(pipe, 0, x, y), middle)
        plain.assert_same(trained(pipe, 2, x, y), wanted)


def model() -> nn.Sequential:
    made = nn.Sequential(
        nn.Embedding(20, 8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 20, bias=False)
    )
    made[3].weight = made[0].weight
    return made


@pytest.mark.parametrize("source", ["initialization", "file"])
def test_each_stage_is_on_its_device(source, tmp_path):
    other, deferred = twins(model)
    options: dict[str, Any] = {"initialize": initialize}
    if source == "file":
        pytest.importorskip("safetensors.torch").save_model(other, str(tmp_path / "model.safetensors"))
        options = {"weights": tmp_path}
    weight = deferred.get_parameter("0.weight")
    how: dict[str, Any] = {"loss_fn": nn.functional.cross_entropy, "micro_batches": 2, "devices": THREE}
    x, y = torch.arange(8), torch.arange(8, 16)
    with (
        cut_by_hand(deferred, [1, 3], **how, **options) as pipe,
        cut_by_hand(other, [1, 3], **how) as plainly,
    ):
        assert deferred.get_parameter("0.weight") is weight is deferred.get_parameter("3.weight")
        places = {name: str(tensor.device) for name, tensor in pipe.state_dict().items()}
        assert places["0.weight"] == places["3.weight"] == "vdev:0"
        assert {places[name] for name in places if name[0] in "12"} == {"vdev:1"}
        plain.assert_same(trained(pipe, 0, x, y), trained(plainly, 0, x, y))
        assert torch.equal(pipe.step(x, target=y).cpu(), plainly.step(x, target=y).cpu())


class Placed(nn.Module):
    """Makes tensors on the device of others between its blocks, and keeps a plain tensor."""

    def __init__(self, width: int = 6, layers: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.scale = nn.Parameter(torch.ones(width))
        self.table = torch.linspace(0.5, 1.5, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        first, places = x, torch.arange(x.shape[1], device=x.device) / x.shape[1]
        for number, block in enumerate(self.blocks):
            x = torch.tanh(block(x)) * self.scale + places + number * mask
            x = (x + torch.zeros_like(first)) * self.table.to(x.device)
        return x + first


def test_devices_follow_the_stages():
    length = 5  # of a sample for eight
    torch.manual_seed(0)
    model = Placed()
    reference = plain.twin(model)
    x, mask, y = torch.randn(8, 6), torch.randn(8, 6).round(), torch.randn(8, 6)
    chain = chain_for(model, (x, mask), loss_fn=LOSS)
    with cut_by_hand(chain, [1, 3], loss_fn=LOSS, micro_batches=2, devices=THREE) as pipe:
        loss = pipe.step(x[:length], mask[:length], target=y[:length])
        assert {str(p.device) for p in model.parameters()} == set(THREE)
    expected = plainly(reference, (x[:length], mask[:length]), target=y[:length], loss_fn=LOSS)
    torch.testing.assert_close(loss.cpu(), expected)
    plain.assert_close(gradients(model), plain.gradients(reference), 1e-5)


def test_what_layers_share_and_hooks_of_parameters_come_along():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4)).double()
    first = model[0]
    model[2].weight = first.weight
    reference = plain.twin(model)
    seen: list[int] = []
    for one in (model, reference):
        one.get_parameter("0.weight").register_hook(lambda gradient: gradient * 3)
    model.get_parameter("3.weight").register_post_accumulate_grad_hook(lambda _: seen.append(2))
    removed = model.get_parameter("3.bias").register_hook(lambda gradient: gradient * 5)
    x, y = plain.sample(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cut_on(TWO, model, [2], LOSS) as pipe:
        removed.remove()
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, LOSS, 4)
    plain.assert_same(gradients(model), plain.gradients(reference))
    assert seen == [2] * 4
    assert first.weight.device == torch.device("vdev:0")
    assert optimizer.param_groups[0]["params"][0] is first.weight


def test_a_parameter_that_a_graph_holds_is_refused():
    """On devices to which torch cannot move a parameter in place."""
    model = three_layers()
    graph = model(plain.sample(8, 4)[0])
    with pytest.raises(
        RuntimeError, match="as a graph or a weak reference holds it: make the pipeline before"
    ):
        cut_on(TWO, model, [2], LOSS)
    assert graph.requires_grad
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


def test_stashes_on_the_host_leave_the_device():
    """Of twelve micro-batches, three stashes stay at most: the outputs of three Tanh, and the target. Inputs stay."""
    row, rows = 4 * 64, 64
    peaks = {}
    for offload in ("never", "stash"):
        gc.collect()
        model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())])
        how: dict[str, Any] = {"micro_batches": 12, "schedule": "gpipe", "offload": offload}
        with cut_on(TWO, model, [6], LOSS, **how) as pipe:
            x, y = torch.randn(2, 12 * rows, 64)
            pipe.step(x, target=y)
            vdev.reset_peak("vdev:1")
            before = vdev.memory("vdev:1").allocated
            pipe.step(x, target=y)
            peaks[offload] = vdev.memory("vdev:1").peak - before
    assert peaks["never"] - peaks["stash"] == 9 * 4 * rows * row


def busy(rounds: int) -> Calls:
    """Multiplies by a matrix ``rounds`` times."""

    def multiply(x: Tensor, matrix: Tensor) -> Tensor:
        for _ in range(rounds):
            x = x @ matrix
        return x

    return Calls(multiply, matrix=nn.Buffer(torch.eye(128)))


def test_layers_are_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[torch.device] = []
    wait = torch.accelerator.synchronize

    def counted(device: torch.device) -> None:
        waits.append(device)
        wait(device)

    monkeypatch.setattr(torch.accelerator, "synchronize", counted)
    model = nn.Sequential(nn.Linear(128, 128), busy(2), busy(200)).to("vdev:0")
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


def sequential() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)), nn.Dropout())


@pytest.mark.parametrize(("make", "home"), [(sequential, "meta"), (partial(Placed, WIDTH, LAYERS), "cpu")])
def test_room_for_one_layer_is_enough(make: Callable[[], nn.Module], home: str) -> None:
    with torch.device(home):
        model = make()
    ids = [id(parameter) for parameter in model.parameters()]
    x, labels = torch.randn(8, WIDTH), torch.randint(WIDTH, (8,))
    sample = x if make is sequential else (x, torch.ones_like(x))
    loss: dict[str, Any] = {"loss_fn": nn.CrossEntropyLoss(), "target": labels}
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


TIMER = 0.06  # seconds that a slow layer computes for, on either clock


def slow(x: Tensor) -> Tensor:
    time.sleep(TIMER)
    return x * 2


def traced(*devices: str) -> Timeline:
    """A step of two stages, the layers of the second slow in their forward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Calls(slow), nn.Linear(4, 2))
    plan = plan_by_hand([str(index) for index in range(4)], [2], micro_batches=3)
    with Pipeline(model, on_devices(plan, devices), nn.MSELoss(), trace=True) as pipe:
        pipe.step(torch.randn(6, 4), target=torch.randn(6, 2))
        trace = pipe.last_trace
    assert trace is not None
    return trace


@pytest.mark.parametrize(
    ("devices", "lateness"),
    [(("vdev:0", "vdev:1"), None), (("vdev:0", "cpu"), 1.0), (("cpu", "vdev:1"), 1.0)],
)
def test_actions_and_messages_are_in_the_order_of_their_dependencies(devices, lateness):
    with vdev.delayed(1, lateness=lateness):
        trace = traced(*devices)
    assert [(t.kind, t.source, t.micro_batch, t.bytes) for t in trace.transfers if t.kind is Kind.F] == [
        (Kind.F, 0, micro_batch, 2 * 4 * 4) for micro_batch in range(3)
    ]
    slack = 0.05  # what two clocks may be apart on a busy machine; an action of another order is TIMER apart
    for transfer in trace.transfers:
        made, taken = (
            next(
                (starts[at], ends[at])
                for row, starts, ends in zip(trace.schedule.actions, trace.starts, trace.ends, strict=True)
                for at, action in enumerate(row)
                if (action.kind, action.stage, action.micro_batch)
                == (transfer.kind, stage, transfer.micro_batch)
            )
            for stage in (transfer.source, transfer.target)
        )
        assert made[1] == transfer.start <= transfer.end <= taken[0] + slack
    for starts, ends in zip(trace.starts, trace.ends, strict=True):
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))


def test_what_a_device_computes_is_its_busy_time():
    trace = traced("vdev:0", "vdev:1")
    assert trace.busy[1] >= 3 * TIMER


def test_untraced_steps_record_no_timed_events(monkeypatch: pytest.MonkeyPatch):
    def recorded(stream: torch.Stream, timed: bool = False) -> torch.Event:
        assert not timed
        return stream.record_event()

    monkeypatch.setattr("pipepart.runtime.transport.cuda.recorded", recorded)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with cut_on(("vdev:0", "vdev:1"), model, [1], nn.MSELoss(), micro_batches=2) as pipe:
        pipe.step(torch.randn(4, 4), target=torch.randn(4, 2))
        assert pipe.last_trace is None
