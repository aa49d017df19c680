"""On devices that run behind the host, numbers are those of the plain model, whatever streams the caller uses."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipepart.runtime.transport.cuda import Callers, Pace, Streams
from pipepart.workers.streams import on_streams
from tests.pipeline.conformance import runners
from tests.pipeline.conformance.test_conformance import check
from tests.support import plain
from tests.support.delayed import DelayedTraining, borders_of
from tests.support.late_scenarios import aside, counted
from tests.support.on_devices import SHARED, THREE, TWO, cut_on, gradients, late
from tests.support.pieces import Fails
from tests.support.seeds import seeds

pytestmark = [pytest.mark.usefixtures("late_devices"), pytest.mark.timeout(600)]


AMONG = runners.AMONG_DEVICES | {"home": list(runners.LATE)}
MODES = list(runners.covering(random.Random(0), each=1, among=AMONG))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_late_devices_train_as_the_plain_model(mode: runners.Mode):
    """Two steps with an optimizer, which writes the weights on the caller's streams while steps are queued."""
    check(mode)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [*runners.SCHEDULES, runners.DRAWN], ids=str)
def test_late_devices_train_as_the_plain_model_in_many_modes(schedule: tuple[str, int]):
    for seed in seeds(4, f"late {schedule}"):
        check(runners.drawn(random.Random(seed), AMONG, schedule=schedule), seed)


def test_the_modes_have_every_home_and_stash_and_the_most_schedules():
    assert {mode.home for mode in MODES} == set(runners.LATE)
    assert {mode.stash for mode in MODES} == set(runners.VALUES["stash"])
    assert len({mode.schedule[0] for mode in MODES}) >= 10


WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 4.0]).double(), ignore_index=-1)
CLASSES = torch.tensor([0, 1, 2, -1, -1, -1, 2, 1, 0, -1, 2, 2])


def counted_by_output(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    counts = output.detach()[:, 0] > -0.2
    return ((output - target).square().mean(1) * counts).sum(), counts.sum()


@pytest.mark.parametrize(
    ("loss_fn", "schedule", "replicas", "target_on", "devices"),
    [
        (WEIGHTED, "1f1b", 2, "vdev:0", [*TWO, *TWO[::-1]]),
        (WEIGHTED, "gpipe", 2, "cpu", [*TWO, *TWO[::-1]]),
        (WEIGHTED, "1f1b", 2, "vdev:1", [*TWO, "cpu", "cpu"]),
        (WEIGHTED, "1f1b", 2, "vdev:0", ["cpu", "cpu", *TWO]),
        (WEIGHTED, "chimera", 1, "vdev:1", TWO),
        (WEIGHTED, "1f1b", 1, "cpu", TWO),
        (WEIGHTED, "1f1b", 1, "vdev:0", TWO),
        *((by, "1f1b", r, "vdev:1", TWO * r) for by in (counted, counted_by_output) for r in (1, 2)),
    ],
)
def test_samples_are_counted_wherever_they_are_and_on_the_streams_of_each_replica(
    loss_fn, schedule, replicas, target_on, devices
):
    """A mean over classes with weights, some targets ignored, or a sum and a count: counts are on the devices."""
    model = plain.in_double([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)])
    reference = plain.twin(model)
    x, y = torch.randn(12, 4).double(), CLASSES if loss_fn is WEIGHTED else torch.randn(12, 3).double()
    expected = loss_fn(reference(x), y)
    if isinstance(expected, tuple):
        expected = expected[0] / expected[1]
    expected.backward()
    with cut_on(devices, model, [2], loss_fn, schedule=schedule, replicas=replicas) as pipe, late():
        loss = pipe.step(x.to("vdev:0"), target=y.to(target_on))
        plain.assert_near(loss.cpu(), expected.detach())
        plain.assert_close(gradients(model), plain.gradients(reference))


def chain(layers: int = 4, width: int = 4) -> nn.Sequential:
    return plain.in_double([part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())])


@pytest.mark.parametrize(
    ("device", "differentiated"), [("vdev:0", True), ("vdev:1", False), ("vdev:1", True), ("cpu", False)]
)
def test_an_input_gets_its_gradient_wherever_it_is(device, differentiated):
    model = chain()
    reference = plain.twin(model)
    x, y = plain.sample(8, 4)
    theirs = x.clone().requires_grad_()
    plain.micro_batched_step(reference, theirs, y, nn.MSELoss(), 4)
    assert theirs.grad is not None
    with cut_on(TWO, model, [4], nn.MSELoss()) as pipe, late(), on_streams(aside()):
        ours = x.clone().to(device).requires_grad_()
        if differentiated:
            nn.functional.mse_loss(pipe(ours * 1), y.to("vdev:1")).backward()
        else:
            pipe.step(ours, target=y)
        assert ours.grad is not None
        plain.assert_near(ours.grad.cpu(), theirs.grad, 1e-12)


def test_a_loss_has_many_outputs_each_of_whose_backwards_begins_within_another():
    """Fewer than the 60 that torch nests on one thread: with more, whether it takes another one depends on timing."""
    model = chain(2)
    reference = plain.twin(model)
    x = plain.sample(4, 4)[0]
    with cut_on(TWO, model, [2], micro_batches=2) as pipe:
        torch.stack([pipe(x.to("vdev:0") + index).sum() for index in range(50)]).sum().backward()
        torch.stack([reference(x + index).sum() for index in range(50)]).sum().backward()
        plain.assert_close(gradients(model), plain.gradients(reference))


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_asynchronous_schedules_keep_the_weights_of_each_micro_batch(schedule):
    def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=0.01)

    model = chain(3, 5)
    oracle = DelayedTraining(copy.deepcopy(model), 3, schedule, adam)
    how: dict[str, Any] = {"micro_batches": 6, "schedule": schedule, "optimizer": adam}
    with cut_on(THREE, model, borders_of(3), nn.MSELoss(), **how) as pipe:
        for x, y in (plain.sample(12, 5) for _ in range(4)):
            with late():
                ours = pipe.step(x.to("vdev:0"), target=y.to("vdev:2"))
                theirs = oracle.step(x, y, nn.MSELoss(), 6)
                assert ours.cpu().equal(theirs)
                expected = [p for stage in oracle.stages for p in stage.parameters()]
                assert all(
                    p.cpu().equal(other) for p, other in zip(model.parameters(), expected, strict=True)
                )


class Looked(Exception):
    """The host has waited for a device."""


@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", "always"), ("zb-h1", "never")])
def test_within_a_step_the_host_looks_at_no_value_of_a_device(monkeypatch, schedule, recompute):
    """After the first steps, in which what layers and loss do is found out."""
    model = plain.in_double([nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 4), nn.GELU()])
    with cut_on(TWO, model, [3], nn.MSELoss(), schedule=schedule, recompute=recompute) as pipe:
        x, y = plain.sample(8, 4)
        x, y = x.to("vdev:0"), y.to("vdev:1")
        for _ in range(2):
            pipe.step(x, target=y)

        def refused(function: Callable[..., Any]) -> Callable[..., Any]:
            def look(tensor: Tensor, *given: Any) -> Any:
                if tensor.device.type != "cpu":
                    raise Looked
                return function(tensor, *given)

            return look

        for name in ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "cpu", "equal"):
            monkeypatch.setattr(Tensor, name, refused(getattr(Tensor, name)))
        monkeypatch.setattr(torch, "equal", refused(torch.equal))
        loss = pipe.step(x, target=y)
        with pytest.raises(Looked):
            loss.item()


def test_the_host_is_held_up_before_each_action(monkeypatch):
    """So that it queues no more than a few ahead of the device."""
    waits: list[Pace] = []
    monkeypatch.setattr(Pace, "wait", lambda pace: waits.append(pace))
    with cut_on(TWO, chain(), [4], nn.MSELoss()) as pipe:
        x, y = plain.sample(8, 4)
        pipe.step(x.to("vdev:0"), target=y.to("vdev:1"))
        assert len(waits) == sum(map(len, pipe.plan.build_schedule().actions))


class OnStream(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.Stream] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(torch.accelerator.current_stream(x.device))
        return x * 1


@pytest.mark.parametrize("devices", [TWO, SHARED])
def test_a_worker_that_has_a_device_alone_computes_on_the_streams_of_the_caller(devices):
    layers = OnStream(), OnStream()
    model = plain.in_double([nn.Linear(4, 4), layers[0], nn.Linear(4, 4), layers[1]])
    x, y = plain.sample(8, 4)
    with cut_on(devices, model, [2], nn.MSELoss()) as pipe:
        for streams in (aside(), aside()):
            with late(), on_streams(streams):
                pipe.step(x.to(devices[0]), target=y.to(devices[1]))
            for layer, stream in zip(layers, streams, strict=True):
                assert len(layer.seen) == 1
                assert (layer.seen == {stream}) == (devices is TWO)
                layer.seen.clear()


@pytest.mark.parametrize("in_layer", [True, False])
def test_a_device_that_is_lost_does_not_hide_what_a_worker_has_met(monkeypatch, in_layer):
    """As after an error of a kernel, every call of the device fails, that at the end of a step among them."""
    model = plain.in_double([nn.Linear(4, 4), Fails() if in_layer else nn.Identity(), nn.Linear(4, 4)])
    x, y = plain.sample(8, 4)
    with cut_on(TWO, model, [2], nn.MSELoss()) as pipe:

        def lost(streams: Streams, callers: Callers) -> None:
            raise RuntimeError("the device is lost")

        with monkeypatch.context() as patch:
            patch.setattr(Streams, "end", lost)
            with pytest.raises(ArithmeticError if in_layer else RuntimeError) as raised:
                pipe.step(x.to("vdev:0"), target=y.to("vdev:1"))
        if in_layer:
            assert "stage 0 of 2" in "".join(raised.value.__notes__)
        pipe.step(x.to("vdev:0"), target=y.to("vdev:1"))


# A process makes streams on the devices of its own workers only: a foreign device may not exist on its host.
CPU, FOREIGN = torch.device("cpu"), torch.device("cuda:63")


def test_no_stream_is_made_on_the_device_of_another_rank():
    assert Streams.of([CPU, FOREIGN], [0]) is None


def test_a_worker_is_alone_on_its_device_if_other_ranks_have_one_of_the_same_name():
    home = torch.device("vdev:0")
    streams = Streams.of([home, home, FOREIGN], [1])
    assert streams is not None
    caller = streams.callers()
    assert list(caller) == [home]
    streams.begin(caller)
    with streams.entered(1):
        assert torch.accelerator.current_stream(home) == caller[home]
    streams.end(caller)
