"""Scenarios for simulated asynchronous devices, which assert on the numbers and on the order of all accesses."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import pipepart
import schedules
from pipepart import Pipeline
from pipepart.capture import flatten
from pipepart.runtime.transport import cuda
from pipepart.runtime.transport.pinned import PinnedCopies
from pipepart.workers.streams import on_streams
from tests.support import plain
from tests.support.chains import plan_by_hand
from tests.support.on_devices import AND_BACK, SHARED, THREE, TWO, cut_on, gradients, late, on_devices, sample
from tests.support.recorded import chain_for
from tests.support.replicas import summed_step
from tests.support.skipping import WIDTH, Hourglass

PARTS = 8


def chain() -> nn.Sequential:
    """Layers that keep their input for the backward, and none its output where it leaves a stage."""
    return plain.in_double(
        [nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)]
    )


def steps(devices: tuple[str, ...] = TWO) -> None:
    """Training, where the optimizer writes the weights on the caller's streams."""
    model = chain()
    reference = plain.twin(model)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, foreach=False)
    with cut_on(devices, model, [3], nn.MSELoss(), micro_batches=PARTS) as pipe:
        ours = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        given = [sample(2 * PARTS, 5) for _ in range(2)]
        moved = [(x.to(devices[0]), y.to(devices[1])) for x, y in given]
        with late():
            for x, y in moved:
                ours.zero_grad()
                pipe.step(x * 1, target=y * 1)
                ours.step()
            for x, y in given:
                theirs.zero_grad()
                plain.micro_batched_step(reference, x, y, nn.MSELoss(), PARTS)
                theirs.step()
            plain.assert_same(gradients(model), plain.gradients(reference))


def offloaded_steps(devices: tuple[str, ...] = TWO) -> None:
    """Stashes that are copied to the host and back, whose memory the next micro-batches use meanwhile."""
    model = chain()
    reference = plain.twin(model)
    x, y = sample(2 * PARTS, 5)
    pipe = cut_on(devices, model, [3], nn.MSELoss(), micro_batches=PARTS, schedule="gpipe", offload="stash")
    with pipe:
        given = x.to(devices[0]), y.to(devices[1])
        with late():
            for _ in range(2):
                pipe.step(given[0] * 1, target=given[1] * 1)
                plain.micro_batched_step(reference, x, y, nn.MSELoss(), PARTS)
            plain.assert_same(gradients(model), plain.gradients(reference))


def offloaded_shared_steps() -> None:
    offloaded_steps(SHARED)


def shared_steps() -> None:
    steps(SHARED)


def steps_to_the_cpu() -> None:
    steps(("vdev:0", "cpu"))


def steps_by_way_of_the_host() -> None:
    """Training on devices that do not write each other's memory."""
    with mock.patch.object(cuda, "are_joined", return_value=False):
        steps()


def forwards(devices: tuple[str, ...] = TWO) -> None:
    """Forwards alone, where nothing but messages keeps what a stage has made."""
    model = chain()
    x, _ = sample(2 * PARTS, 5)
    expected = model(x).detach()
    with cut_on(devices, model, [3], micro_batches=PARTS) as pipe, torch.no_grad(), late():
        for _ in range(2):
            assert pipe(x.to(devices[0])).cpu().allclose(expected, rtol=1e-12)


def shared_forwards() -> None:
    forwards(SHARED)


def targets_elsewhere() -> None:
    """Targets on the first device, which are just being made, and are written into behind the step.

    The first stage has nothing to train, so that its streams do not wait for the loss.
    """
    model = chain()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    model[2].requires_grad_(False)
    reference = plain.twin(model)
    x, y = sample(2 * PARTS, 5)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), PARTS)
    with cut_on(TWO, model, [3], nn.MSELoss(), micro_batches=PARTS) as pipe:
        x, y = x.to("vdev:0"), y.to("vdev:0")
        with late():
            target = y * 1
            pipe.step(x, target=target)
            target.zero_()
            torch.accelerator.current_stream(target.device).synchronize()
            plain.assert_same(gradients(model), plain.gradients(reference))


def differentiated_aside() -> None:
    """The forward on the default streams, the backward and what reads its gradients on others."""
    model = chain()
    reference = plain.twin(model)
    x, _ = sample(2 * PARTS, 5)
    for part in x.split(2):
        reference(part).backward(torch.ones_like(part))
    with cut_on(TWO, model, [3], micro_batches=PARTS) as pipe, late():
        out = pipe(x.to("vdev:0"))
        done = [torch.accelerator.current_stream(device).record_event() for device in map(torch.device, TWO)]
        aside = [torch.Stream(torch.device(device)) for device in TWO]
        with on_streams(aside):
            for stream, event in zip(aside, done, strict=True):
                stream.wait_event(event)
            out.sum().backward()
            plain.assert_same(gradients(model), plain.gradients(reference))


def differentiated_again() -> None:
    """Forwards that run again in the backward, on autograd's thread, on streams of the caller."""
    model = chain()
    reference = plain.twin(model)
    x, _ = sample(2 * PARTS, 5)
    for part in x.split(2):
        reference(part).backward(torch.ones_like(part))
    aside = [torch.Stream(torch.device(device)) for device in TWO]
    pipe = cut_on(TWO, model, [3], micro_batches=PARTS, recompute="always")
    with pipe, late(), on_streams(aside):
        pipe(x.to("vdev:0")).sum().backward()
        plain.assert_same(gradients(model), plain.gradients(reference))


def input_gradients() -> None:
    """Of an input on the CPU, which autograd's thread copies from the first device."""
    model = chain()
    reference = plain.twin(model)
    x, _ = sample(2 * PARTS, 5)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    for part in theirs.split(2):
        reference(part).backward(torch.ones_like(part))
    aside = [torch.Stream(torch.device(device)) for device in TWO]
    with cut_on(TWO, model, [3], micro_batches=PARTS) as pipe, late(), on_streams(aside):
        pipe(ours * 1).sum().backward()
        assert ours.grad is not None
        assert theirs.grad is not None
        assert ours.grad.equal(theirs.grad)


def zeroed_aside() -> None:
    """Forward, backward and what is done to gradients between them, on streams of the caller."""
    model = chain()
    reference = plain.twin(model)
    x, _ = sample(2 * PARTS, 5)
    for part in x.split(2):
        reference(part).backward(torch.ones_like(part))
    aside = [torch.Stream(torch.device(device)) for device in TWO]
    with cut_on(TWO, model, [3], micro_batches=PARTS) as pipe, late(), on_streams(aside):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        out = pipe(x.to("vdev:0"))
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
        out.sum().backward()
        plain.assert_same(gradients(model), plain.gradients(reference))


def inputs_elsewhere() -> None:
    """An input that is just being made, on the device of a later stage."""
    model = chain()
    x, _ = sample(2 * PARTS, 5)
    expected = model(x).detach()
    with cut_on(TWO, model, [3], micro_batches=PARTS) as pipe, torch.no_grad():
        x = x.to("vdev:1")
        with late():
            assert pipe(x * 1).cpu().allclose(expected, rtol=1e-12)


def skipping_steps(devices: tuple[str, ...] = THREE) -> None:
    """Values that go past the stage in the middle, and wait at the first one."""
    torch.manual_seed(0)
    model = Hourglass(3).double()
    reference = plain.twin(model)
    x, y = sample(2 * PARTS, WIDTH)
    recorded = chain_for(model, x, loss_fn=nn.MSELoss(), parts=PARTS)
    plan = plan_by_hand([name for name, _ in recorded.layers], [2, 4], micro_batches=PARTS)
    with Pipeline(recorded, on_devices(plan, devices), nn.MSELoss()) as pipe:  # type: ignore[arg-type]
        x, y = x.to(devices[0]), y.to(devices[-1])
        with late():
            for _ in range(2):
                pipe.step(x * 1, target=y * 1)
                plain.micro_batched_step(reference, x.cpu(), y.cpu(), nn.MSELoss(), PARTS)
            plain.assert_same(gradients(model), plain.gradients(reference))


def skipping_forwards() -> None:
    """Forwards alone, where only messages keep a value that goes past a stage."""
    torch.manual_seed(0)
    model = Hourglass(3).double()
    x, _ = sample(2 * PARTS, WIDTH)
    expected = model(x).detach()
    recorded = chain_for(model, x, loss_fn=nn.MSELoss(), parts=PARTS)
    plan = plan_by_hand([name for name, _ in recorded.layers], [2, 4], micro_batches=PARTS)
    with Pipeline(recorded, on_devices(plan, THREE)) as pipe, torch.no_grad(), late():  # type: ignore[arg-type]
        for _ in range(2):
            assert pipe(x.to(THREE[0])).cpu().allclose(expected, rtol=1e-12)


def skipping_to_the_cpu() -> None:
    skipping_steps(("vdev:0", "vdev:1", "cpu"))


def skipping_from_the_cpu() -> None:
    skipping_steps(("cpu", "vdev:1", "vdev:0"))


def skipping_and_back() -> None:
    skipping_steps(AND_BACK)


class Adding(nn.Module):
    """Adds a loss of its own."""

    def forward(self, x: Tensor) -> Tensor:
        pipepart.add_loss(x.square().mean())
        return x


def counted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of a loss and the number of samples that count in it."""
    counts = target[:, 0] > 0
    return ((output - target).square().mean(1) * counts).sum(), counts.sum()


def evaluated_aside(loss_fn: Any = None, adding: bool = False, **options: Any) -> None:
    """Mini-batches that are evaluated on streams of the caller which have no order among them."""
    loss_fn = loss_fn or nn.MSELoss()
    model = nn.Sequential(*chain(), *([Adding()] if adding else [])).double()
    given = [sample(2 * PARTS, 5) for _ in range(4)]
    with cut_on(SHARED, model, [3], loss_fn, micro_batches=PARTS, **options) as pipe:
        moved = [(x.to("vdev:0"), y.to("vdev:0")) for x, y in given]
        with late():
            losses = []
            for x, y in moved:
                with on_streams([torch.Stream(torch.device("vdev:0"))]):
                    losses.append(pipe.evaluate(x, target=y))
            torch.accelerator.synchronize("vdev:0")
            found = [loss.item() for loss in losses]
        again = [pipe.evaluate(x, target=y).item() for x, y in moved]
    assert found == again


def evaluated_aside_by_counts() -> None:
    evaluated_aside(counted)


def evaluated_aside_with_losses_of_layers() -> None:
    evaluated_aside(adding=True)


def evaluated_aside_at_once() -> None:
    evaluated_aside(reduction="batch", schedule="gpipe")


class Interrupting(nn.Module):
    """Calls what is set, once."""

    def __init__(self) -> None:
        super().__init__()
        self.then: Callable[[], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        then, self.then = self.then, None
        if then:
            then()
        return x + 0


def outputs_that_another_thread_frees() -> None:
    """One that reads an output on the caller's stream, and lets go of it while the next run is on and ahead."""
    interrupting, waiting = Interrupting(), Interrupting()
    layers = [nn.Linear(5, 5) for _ in range(6)]
    model = nn.Sequential(nn.Linear(5, 5), interrupting, *layers, waiting).double()
    x, _ = sample(4, 5)
    expected = model(x).detach() * 2
    found: list[Tensor] = []
    with cut_on(SHARED, model, [2], micro_batches=1) as pipe, torch.no_grad(), late():
        caller = torch.accelerator.current_stream(torch.device("vdev:0"))
        held = [pipe(x.to("vdev:0"))]

        def read_and_free() -> None:
            with on_streams([caller]):
                found.append(held.pop() * 2)

        interrupting.then = read_and_free
        x = -x
        waiting.then = lambda: torch.accelerator.current_stream().synchronize()
        pipe(x.to("vdev:0"))
        assert found[0].cpu().allclose(expected, rtol=1e-12)


def pinned_and_written() -> None:
    """Inputs in pinned memory, which the caller fills anew as soon as the copies are done."""
    copies = PinnedCopies([torch.device(device) for device in TWO], range(2))
    inputs = [sample(2, 5)[0] for _ in range(PARTS)]
    pinned = [x.pin_memory() for x in inputs]
    schedule = schedules.build("1f1b", devices=2, micro_batches=PARTS)
    with late():
        copied = copies.inputs(schedule, pinned)
        copies.wait()
        for x in pinned:
            x.zero_()
        assert all(copy.device == torch.device(TWO[0]) for copy in copied)
        assert all(copy.cpu().equal(x) for copy, x in zip(copied, inputs, strict=True))


def pinned_steps() -> None:
    """Pinned mini-batches, whose copies are queued while the devices still compute the step before."""
    model = chain()
    reference = plain.twin(model)
    given = [sample(2 * PARTS, 5) for _ in range(5)]
    with cut_on(TWO, model, [3], nn.MSELoss(), micro_batches=PARTS) as pipe, late():
        for x, y in given:
            pipe.step(x.pin_memory(), target=y.pin_memory())
        for x, y in given:
            plain.micro_batched_step(reference, x, y, nn.MSELoss(), PARTS)
        plain.assert_same(gradients(model), plain.gradients(reference))


def loaded_on_a_device() -> None:
    """Inputs that are computed on the second device, and a splitter that computes on both."""

    def split(batch: tuple[Tensor, Tensor], most: int) -> list[tuple[Tensor, Tensor]]:
        x, y = batch
        return [(x[part::most].clone(), y[part::most] + 0) for part in range(most)]

    model = chain()
    reference = plain.twin(model)
    given = [sample(2 * PARTS, 5) for _ in range(5)]
    moved = [(x.to(TWO[1]), y) for x, y in given]
    with cut_on(TWO, model, [3], nn.MSELoss(), micro_batches=PARTS, split=split) as pipe, late():
        for x, y in moved:
            pipe.step(x * 2, target=y)
        for pair in given:
            x, y = (torch.cat([one[part::PARTS] for part in range(PARTS)]) for one in pair)
            plain.micro_batched_step(reference, x * 2, y, nn.MSELoss(), PARTS)
        plain.assert_same(gradients(model), plain.gradients(reference))


def copies_side_by_side(scaler: Any = None) -> None:
    """Two copies of the model on the same devices, whose last stages ask for the same seeds of gradients."""
    model = chain()
    reference = plain.twin(model)
    plan = plan_by_hand([name for name, _ in flatten(model)], [3], replicas=2, micro_batches=4)
    x, y = sample(8, 5)
    summed_step(reference, x, y, nn.MSELoss(), (0, 1, 0, 1))
    with Pipeline(model, on_devices(plan, TWO * 2), nn.MSELoss()) as pipe, late():
        pipe.step(x.to("vdev:0"), target=y.to("vdev:1"), scaler=scaler)
        found = gradients(model)
        if scaler:
            found = {name: None if g is None else g / 4 for name, g in found.items()}
        plain.assert_same(found, plain.gradients(reference))


def scaled_copies_side_by_side() -> None:
    copies_side_by_side(torch.amp.GradScaler("vdev", init_scale=4.0))


# In which no single wait or hold is missed alone, or not in one of them first.
MORE = [
    copies_side_by_side,
    scaled_copies_side_by_side,
    differentiated_again,
    differentiated_aside,
    input_gradients,
    loaded_on_a_device,
    zeroed_aside,
    skipping_steps,
    skipping_to_the_cpu,
    skipping_from_the_cpu,
    skipping_and_back,
    evaluated_aside_by_counts,
    evaluated_aside_at_once,
]
