"""A pipeline trains as the plain model does, bit for bit: every scenario, with few of the ways to run it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import schedules
from tests.pipeline.conformance import runners
from tests.pipeline.conformance.between import CHANGES, FAILURE, TO_DOUBLE, Fuse, drawn_event
from tests.pipeline.conformance.scenarios import SCENARIOS
from tests.support import plain
from tests.support.on_devices import late
from tests.support.seeds import seeds

ROUNDING = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 0.1}
STEPS = 2
COMPILED_STEPS = 3  # one of single layers, one that compiles, one of what is compiled


def replica_of(mode: runners.Mode) -> tuple[int, ...]:
    """The replicas that micro-batches take in turn; chimera has one for each direction."""
    if mode.schedule[0] == "chimera":
        return (0, 1) if mode.replicas == 1 else (0, 2, 1, 3)
    return tuple(range(mode.replicas))


def called_step(
    model: nn.Module, x: Any, y: Tensor, loss_fn: Callable[..., Tensor], parts: int, drawing: bool
) -> Tensor:
    """All forwards, the loss of the whole output, and the backward of one micro-batch after the other."""
    outputs = plain.outputs(model, plain.split(x, parts), drawing)
    joined = torch.cat([output.detach() for output in outputs]).requires_grad_()
    loss = loss_fn(joined, y)
    loss.backward()
    assert joined.grad is not None
    for output, gradient in zip(outputs, joined.grad.tensor_split(parts), strict=True):
        output.backward(gradient)
    return loss


def check(
    mode: runners.Mode, seed: int = 0, change: Callable[[nn.Module], None] | None = None, event: str = ""
) -> None:
    """Two steps: gradients of parameters and inputs, buffers, losses and weights are those of the plain model.

    They are those of micro-batches one after the other, bit for bit. In float64, where layers neither draw nor write
    buffers, they are those of the whole mini-batch up to rounding. Kernels of CUDA round in their own way. Between the
    steps the model is changed, or a step fails, as the ``event`` says, which is drawn by default.
    """
    what = mode.what
    loss_fn, mean = (what.loss, True) if what.loss else runners.LOSSES[mode.loss]
    model, reference, whole = (made(mode, seed) for _ in range(3))
    undivided = mode.dtype == torch.float64 and not (what.draws or what.writes or what.by_batch)
    event = event or drawn_event(mode)
    optimizers = [runners.sgd(each.parameters()) for each in (reference, whole, model)]
    by_stage = mode.runner == "optimizers of stages"
    rounding = ROUNDING[mode.dtype]
    if change:
        change(model)
    fuse = Fuse(model, random.Random(str(mode)), mode.parts) if event == FAILURE else None
    is_late, on_cuda = mode.home in runners.LATE, mode.home in runners.CUDA
    same: Callable[..., None] = partial(plain.assert_close, relative=1e-9) if on_cuda else plain.assert_same
    # Dropout on a device draws other numbers than on the CPU.
    beside = ("vdev:7" if is_late else "cuda:0" if on_cuda else "cpu") if what.draws else "cpu"
    reference.to(beside)
    with mode.pipeline(model) as pipe, late() if is_late else nullcontext():
        ends = [pipe.plan.cluster.device(pipe.plan.stages[end].device).torch_device for end in (0, -1)]
        first, last = ends if mode.device_of else ("cpu", "cpu")
        for step in range(COMPILED_STEPS if mode.runner in runners.BACKENDS else STEPS):
            dtype = torch.float64 if event == TO_DOUBLE and step else mode.dtype
            x, y = runners.as_dtype(what.batch(mode.sizes[0] + step), dtype)
            if step == 1 and fuse:
                fuse.check_failure(pipe, moved(x, first), moved(y, last))
            for each in (model, reference, whole) if step == 1 else ():
                each.zero_grad() if fuse else CHANGES[event](each)
            parts = min(mode.sizes[1], mode.sizes[0] + step)
            ours, theirs, others = (
                runners.asking(moved(x, first)),
                runners.asking(moved(x, beside)),
                runners.asking(x),
            )
            torch.manual_seed(step)
            if mode.runner == "called":
                loss = loss_fn(plain.call(pipe, ours), moved(y, last))
                loss.backward()
                torch.manual_seed(step)
                expected = called_step(reference, theirs, moved(y, beside), loss_fn, parts, what.draws)
            else:
                loss = plain.call(partial(pipe.step, target=moved(y, last)), ours)
                torch.manual_seed(step)
                expected = plain.micro_batched_step(
                    reference, theirs, moved(y, beside), loss_fn, parts, mean, what.draws, replica_of(mode)
                )
            loss = loss.detach().cpu()
            plain.assert_near(loss.double(), expected.detach().cpu().double(), rounding, "loss")
            same(left(model, ours), left(reference, theirs))
            if undivided:
                plain.assert_near(loss, plain.whole_step(whole, others, y, loss_fn), rounding, "loss")
                plain.assert_close(left(model, ours), left(whole, others), rounding)
            for optimizer in optimizers[: 2 if by_stage else 3]:
                optimizer.step()
                if by_stage:
                    optimizer.zero_grad()
            same(on_cpu(model.named_buffers()), on_cpu(reference.named_buffers()))
    if not by_stage:
        same(on_cpu(model.named_parameters()), on_cpu(reference.named_parameters()))


def made(mode: runners.Mode, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return mode.what.make().to(mode.dtype)


def moved(nest: Any, device: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), nest)


def on_cpu(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return tensors on the CPU, none of them sparse, counts in the type of the others."""
    return {name: dense(tensor.detach()).cpu().double() for name, tensor in named}


def dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def left(model: nn.Module, x: Any) -> dict[str, Tensor | None]:
    """The gradients of parameters and inputs on the CPU, none of them sparse."""
    leaves = [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]
    inputs = {f"input {place}": leaf.grad for place, leaf in enumerate(leaves)}
    return {
        name: None if gradient is None else dense(gradient).cpu()
        for name, gradient in (plain.gradients(model) | inputs).items()
    }


ALL = list(runners.all_modes())


@pytest.mark.parametrize("mode", ALL, ids=str)
@pytest.mark.filterwarnings("ignore:.*(weight_norm|torch.jit.script).*")
def test_a_pipeline_trains_as_the_plain_model(mode: runners.Mode):
    check(mode)


@pytest.mark.parametrize("seed", range(12))
def test_a_step_that_fails_leaves_nothing_to_the_next_one(seed: int):
    choose, stash = random.Random(seed), runners.VALUES["stash"][seed % 5]
    kinds = ["linear", "dropout", "tied ends", "residual"]
    given = {"scenario": choose.choice(kinds), "runner": "step", "stash": stash, "replicas": 1 + seed % 2}
    check(runners.drawn(choose, **given), event=FAILURE)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.filterwarnings("ignore:.*(weight_norm|torch.jit.script).*")
def test_a_pipeline_trains_as_the_plain_model_in_many_modes(scenario: str):
    for seed in seeds(60 if scenario == "anything" else 9, f"conformance {scenario}"):
        check(runners.drawn(random.Random(seed), scenario=scenario), seed)


@pytest.mark.slow
def test_a_backward_that_is_compiled_with_statistics_writes_and_a_parameter_of_two_stages():
    check(runners.drawn(random.Random(0), scenario="all at once", runner="compiled backward", stash="always"))


def test_every_schedule_that_a_pipeline_can_run_is_among_the_modes():
    with_an_optimizer_in_the_step = {"pipedream", "pipedream-2bw"}
    found = {mode.schedule[0] for mode in ALL}
    assert found - {runners.DRAWN[0]} | with_an_optimizer_in_the_step == set(schedules.names())
    assert {name for name, _ in [*runners.SCHEDULES, runners.DRAWN]} == found


def test_the_modes_have_every_setting_with_several_others():
    assert {mode.scenario for mode in ALL} == set(SCENARIOS)
    assert {drawn_event(mode) for mode in ALL} == {*CHANGES, FAILURE}
    for name, values in runners.VALUES.items():
        for value in set(values) if name != "scenario" else ():
            modes = [mode for mode in ALL if getattr(mode, name) == value]
            for other in ("runner", "dtype", "schedule", "stash"):
                several = len({getattr(mode, other) for mode in modes}) >= 2
                assert several or other == name or (value, other) == ("apart", "dtype"), (name, value, other)
