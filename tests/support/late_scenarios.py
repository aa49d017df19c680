"""Scenarios for simulated asynchronous devices, which assert on the numbers and on the order of all accesses."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import pipepart
from pipepart.workers.streams import on_streams
from tests.support import plain
from tests.support.on_devices import SHARED, THREE, TWO, cut_on, gradients, late
from tests.support.recorded import chain_for
from tests.support.skipping import WIDTH, Hourglass
from tests.support.two_parts import Calls

PARTS = 8
FOUR = ("vdev:0", "vdev:1", "vdev:2", "vdev:3")


def assert_same_input_gradients(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for x, other in zip(ours, theirs, strict=True):
        assert x.grad is not None
        assert other.grad is not None
        assert x.grad.cpu().allclose(other.grad, rtol=1e-12)


def chain() -> nn.Sequential:
    """Layers that keep their input for the backward, and none its output where it leaves a stage."""
    return plain.in_double(
        [nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)]
    )


def aside(devices: tuple[str, ...] = TWO) -> list[torch.Stream]:
    """Return streams that are not the default ones of their devices."""
    return [torch.Stream(torch.device(device)) for device in dict.fromkeys(devices)]


def steps(devices: tuple[str, ...] = TWO, pinned: bool = False, batches: int = 2, **options: Any) -> None:
    """Training, where the optimizer writes the weights on the caller's streams."""
    model = chain()
    reference = plain.twin(model)
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.1, foreach=False) for one in (model, reference))
    given = [plain.sample(2 * PARTS, 5) for _ in range(batches)]
    with cut_on(devices, model, [3], nn.MSELoss(), micro_batches=PARTS, **options) as pipe:
        moved = given if pinned else [(x.to(devices[0]), y.to(devices[1])) for x, y in given]
        with late():
            for x, y in moved:
                ours.zero_grad()
                x, y = (x.pin_memory(), y.pin_memory()) if pinned else (x * 1, y * 1)
                pipe.step(x, target=y)
                ours.step()
            for x, y in given:
                theirs.zero_grad()
                plain.micro_batched_step(reference, x, y, nn.MSELoss(), PARTS)
                theirs.step()
            plain.assert_same(gradients(model), plain.gradients(reference))


def failing_steps(devices: tuple[str, ...] = SHARED) -> None:
    """Steps that end in their fourth micro-batch, while stashes of earlier ones are being copied to the host."""
    calls = iter(range(2 * PARTS))

    def fail(x: Tensor) -> Tensor:
        if next(calls) % 4 == 3:
            raise ArithmeticError("on purpose")
        return x * 1

    model = nn.Sequential(*chain(), Calls(fail)).double()
    x, y = (one.to(device) for one, device in zip(plain.sample(2 * PARTS, 5), devices, strict=True))
    how: dict[str, Any] = {"micro_batches": PARTS, "schedule": "gpipe", "offload": "stash"}
    with cut_on(devices, model, [3], nn.MSELoss(), **how) as pipe, late():
        for _ in range(2):
            with contextlib.suppress(ArithmeticError):
                pipe.step(x * 1, target=y * 1)


def forwards(devices: tuple[str, ...] = TWO, source: str = "vdev:0", skips: bool = False) -> None:
    """Forwards alone, where nothing but messages keeps what a stage has made; the input is just being made.

    With ``skips``, values go past the stage in the middle.
    """
    model = Hourglass(3).double() if skips else chain()
    x, _ = plain.sample(2 * PARTS, WIDTH if skips else 5)
    expected = model(x).detach()
    layers, borders = (chain_for(model, x, parts=PARTS), [2, 4]) if skips else (model, [3])
    with cut_on(devices, layers, borders, micro_batches=PARTS) as pipe, torch.no_grad():
        x = x.to(source)
        with late():
            for _ in range(2):
                assert pipe(x * 1).cpu().allclose(expected, rtol=1e-12)


def targets_elsewhere() -> None:
    """Targets on the first device, which are just being made, and are written into behind the step.

    The first stage has nothing to train, so that its streams do not wait for the loss.
    """
    model = chain()
    model[:3].requires_grad_(False)
    reference = plain.twin(model)
    x, y = plain.sample(2 * PARTS, 5)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), PARTS)
    with cut_on(TWO, model, [3], nn.MSELoss(), micro_batches=PARTS) as pipe:
        x, y = x.to("vdev:0"), y.to("vdev:0")
        with late():
            target = y * 1
            pipe.step(x, target=target)
            target.zero_()
            torch.accelerator.current_stream(target.device).synchronize()
            plain.assert_same(gradients(model), plain.gradients(reference))


def differentiated(
    from_default: bool = False, on_host: bool = False, zeroed: bool = False, **options: Any
) -> None:
    """A forward, on the default streams if ``from_default``, and a backward on streams of the caller.

    Autograd's thread copies the gradient of an input ``on_host`` there. Gradients of before may be ``zeroed`` between
    forward and backward.
    """
    model = chain()
    reference = plain.twin(model)
    x, _ = plain.sample(2 * PARTS, 5)
    ours, theirs = x.clone().requires_grad_(on_host), x.clone().requires_grad_(on_host)
    for part in theirs.split(2):
        reference(part).backward(torch.ones_like(part))
    defaults = [torch.accelerator.current_stream(torch.device(device)) for device in TWO]
    with cut_on(TWO, model, [3], micro_batches=PARTS, **options) as pipe, late():
        others = aside()
        with on_streams(defaults if from_default else others):
            for parameter in model.parameters() if zeroed else ():
                parameter.grad = torch.ones_like(parameter)
            out = pipe(ours * 1 if on_host else x.to("vdev:0"))
            for parameter in model.parameters() if zeroed else ():
                assert parameter.grad is not None
                parameter.grad.zero_()
        for stream, default in zip(others, defaults, strict=True):
            if from_default:
                stream.wait_stream(default)
        with on_streams(others):
            out.sum().backward()
            plain.assert_same(gradients(model), plain.gradients(reference))
            if on_host:
                plain.assert_same({"input": ours.grad}, {"input": theirs.grad})


def add_loss(x: Tensor) -> Tensor:
    pipepart.add_loss(x.square().mean())
    return x


def counted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of a loss and the number of samples that count in it."""
    counts = target[:, 0] > 0
    return ((output - target).square().mean(1) * counts).sum(), counts.sum()


def evaluated_aside(loss_fn: Any = None, adding: bool = False, **options: Any) -> None:
    """Mini-batches that are evaluated on streams of the caller which have no order among them."""
    model = nn.Sequential(*chain(), *([Calls(add_loss)] if adding else [])).double()
    given = [plain.sample(2 * PARTS, 5) for _ in range(4)]
    with cut_on(SHARED, model, [3], loss_fn or nn.MSELoss(), micro_batches=PARTS, **options) as pipe:
        moved = [(x.to("vdev:0"), y.to("vdev:0")) for x, y in given]
        with late():
            losses = []
            for x, y in moved:
                with on_streams(aside(SHARED)):
                    losses.append(pipe.evaluate(x, target=y))
            torch.accelerator.synchronize("vdev:0")
            found = [loss.item() for loss in losses]
        again = [pipe.evaluate(x, target=y).item() for x, y in moved]
    assert found == again


def outputs_that_another_thread_frees() -> None:
    """One that reads an output on the caller's stream, and lets go of it while the next run is on and ahead."""
    then: list[Callable[[], None]] = []

    def interrupt(x: Tensor) -> Tensor:
        if then:
            then.pop()()
        return x + 0

    model = nn.Sequential(nn.Linear(5, 5), Calls(interrupt), *[nn.Linear(5, 5) for _ in range(6)]).double()
    x, _ = plain.sample(4, 5)
    expected = model(x).detach() * 2
    found: list[Tensor] = []
    with cut_on(SHARED, model, [2], micro_batches=1) as pipe, torch.no_grad(), late():
        caller = torch.accelerator.current_stream(torch.device("vdev:0"))
        held = [pipe(x.to("vdev:0"))]

        def read_and_free() -> None:
            with on_streams([caller]):
                found.append(held.pop() * 2)

        then.append(read_and_free)
        pipe(-x.to("vdev:0"))
        assert found[0].cpu().allclose(expected, rtol=1e-12)


def input_made_on_another_stream(devices: tuple[str, ...] = TWO, **options: Any) -> None:
    """The gradient of an input goes to a node of another stream than the pipeline was called on.

    Of replicas, parts of that gradient are copied to the device of the input.
    """
    model = chain()
    reference = plain.twin(model)
    x, _ = plain.sample(4, 5)
    theirs = x.clone().requires_grad_()
    reference(theirs * 2).sum().backward()
    with cut_on(devices, model, [3], **options) as pipe, late():
        ours = x.to(devices[0]).requires_grad_()
        (first, *_), others = aside(devices), aside(devices)
        first.wait_stream(torch.accelerator.current_stream(torch.device(devices[0])))
        with on_streams([first]):
            doubled = ours * 2
        others[0].wait_stream(first)
        with on_streams(others):
            loss = pipe(doubled).sum()
        loss.backward()
        assert_same_input_gradients([ours], [theirs])


def input_gradients_on_several_streams() -> None:
    """The backward of the first output begins once the gradient of the other's input was read and freed.

    Their forwards were on different streams of the caller.
    """
    model = chain()
    reference = plain.twin(model)
    values = [plain.sample(4, 5)[0] for _ in range(2)]
    theirs = [x.clone().requires_grad_() for x in values]
    for x in theirs:
        reference(x * 2).sum().backward()
    with cut_on(SHARED, model, [3], micro_batches=1) as pipe, late():
        ours = [x.to(SHARED[0]).requires_grad_() for x in values]
        losses = []
        for x in ours:
            (stream,) = aside(SHARED)
            stream.wait_stream(torch.accelerator.current_stream())
            with on_streams([stream]):
                losses.append(pipe(x * 2).sum())
        torch.autograd.backward(losses)
        assert_same_input_gradients(ours, theirs)


def several_outputs(devices: tuple[str, ...] = TWO, of_inputs: bool = True, **options: Any) -> None:
    """A loss of several outputs: autograd begins the backward of one while it waits for a device in that of another.

    Of replicas, autograd copies gradients of the parts of one output within the backward of another.
    """
    model = chain()
    reference = plain.twin(model)
    values = [plain.sample(2 * PARTS, 5)[0] for _ in range(3)]
    theirs = [x.clone().requires_grad_() for x in values]
    torch.stack([reference(x * 2).sum() for x in theirs]).sum().backward()
    with cut_on(devices, model, [3], micro_batches=PARTS, **options) as pipe, late():
        ours = [x.to(devices[0]).requires_grad_(of_inputs) for x in values]
        torch.stack([pipe(x * 2).sum() for x in ours]).sum().backward()
        if of_inputs:
            assert_same_input_gradients(ours, theirs)
        plain.assert_close(gradients(model), plain.gradients(reference))


def pinned_and_written() -> None:
    """A mini-batch in pinned memory, which the caller fills anew behind the step.

    It has so few micro-batches that no worker waits for its device.
    """
    model = chain()
    reference = plain.twin(model)
    given = plain.sample(4, 5)
    plain.micro_batched_step(reference, *given, nn.MSELoss(), 2)
    with cut_on(TWO, model, [3], nn.MSELoss(), micro_batches=2) as pipe, late():
        x, y = (each.pin_memory() for each in given)
        pipe.step(x, target=y)
        x.zero_()
        y.zero_()
        plain.assert_same(gradients(model), plain.gradients(reference))


def replicas(scaled: bool = False) -> None:
    """Two replicas of the model on the same devices, whose last stages ask for the same seeds of gradients."""
    model = chain()
    reference = plain.twin(model)
    x, y = plain.sample(8, 5)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4, replica_of=(0, 1, 0, 1))
    scaler = torch.amp.GradScaler("vdev", init_scale=4.0) if scaled else None
    with cut_on(TWO * 2, model, [3], nn.MSELoss(), replicas=2) as pipe, late():
        pipe.step(x.to("vdev:0"), target=y.to("vdev:1"), scaler=scaler)
        found = gradients(model)
        if scaled:
            found = {name: None if g is None else g / 4 for name, g in found.items()}
        plain.assert_same(found, plain.gradients(reference))


SCENARIOS: dict[str, Callable[[], None]] = {
    "steps": steps,
    "shared steps": partial(steps, SHARED),
    "steps to the CPU": partial(steps, ("vdev:0", "cpu")),
    "offloaded steps": partial(steps, schedule="gpipe", offload="stash"),
    "offloaded shared steps": partial(steps, SHARED, schedule="gpipe", offload="stash"),
    "offloaded steps that fail": failing_steps,
    "offloaded steps that fail, on two devices": partial(failing_steps, TWO),
    "several outputs": several_outputs,
    "several outputs, recomputed": partial(several_outputs, recompute="always"),
    "several outputs, with the CPU": partial(several_outputs, ("vdev:0", "cpu")),
    "several outputs of replicas": partial(several_outputs, FOUR, False, replicas=2),
    "several outputs of replicas, of inputs": partial(several_outputs, FOUR, replicas=2),
    "input made on another stream": partial(input_made_on_another_stream, micro_batches=1),
    "input of replicas": partial(input_made_on_another_stream, FOUR, replicas=2),
    "pinned steps": partial(steps, pinned=True, batches=5),
    "pinned and written": pinned_and_written,
    "forwards": forwards,
    "shared forwards": partial(forwards, SHARED),
    "inputs elsewhere": partial(forwards, source="vdev:1"),
    "targets elsewhere": targets_elsewhere,
    "differentiated aside": partial(differentiated, from_default=True),
    "recomputed aside": partial(differentiated, recompute="always"),
    "input gradients": partial(differentiated, on_host=True),
    "zeroed aside": partial(differentiated, zeroed=True),
    "skipping forwards": partial(forwards, THREE, skips=True),
    "evaluated aside": evaluated_aside,
    "evaluated aside by counts": partial(evaluated_aside, counted),
    "evaluated aside with losses of layers": partial(evaluated_aside, adding=True),
    "evaluated aside at once": partial(evaluated_aside, reduction="batch", schedule="gpipe"),
    "outputs that another thread frees": outputs_that_another_thread_frees,
    "input gradients on several streams": input_gradients_on_several_streams,
    "replicas": replicas,
    "scaled replicas": partial(replicas, scaled=True),
}
