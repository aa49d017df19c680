"""Steps on GPUs have the numbers of the plain model on the CPU, up to the order in which kernels sum."""

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipepart import Pipeline
from pipepart.capture import flatten
from tests.gpu.late import CYCLES, borders, late_chain
from tests.pipeline.conformance.runners import AMONG_DEVICES, CUDA, Mode, covering
from tests.pipeline.conformance.test_conformance import check
from tests.support import plain
from tests.support.chains import on_devices, plan_by_hand
from tests.support.delayed import DelayedTraining, batches, borders_of
from tests.support.on_devices import cut_on, gradients, sample, state
from tests.support.pieces import Fails

CLOSE = 1e-9
MODES = list(covering(random.Random(0), each=2, among=AMONG_DEVICES | {"home": list(CUDA)}))


def slowed(model: nn.Module) -> None:
    """Delay the GPU before each layer of a chain, in either direction, so that a missing wait shows in the numbers."""

    def sleep(*_: object) -> None:
        torch.cuda._sleep(CYCLES)

    def slow_backward(layer: nn.Module, given: Any, output: Any) -> None:
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(sleep)

    for layer in model.children() if isinstance(model, nn.Sequential) else ():
        layer.register_forward_pre_hook(sleep)
        layer.register_forward_hook(slow_backward)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_pipeline_trains_as_the_plain_model(mode: Mode):
    if mode.home == "cuda on two" and torch.cuda.device_count() < 2:
        pytest.skip("there is one CUDA device")
    check(mode, change=slowed)


def test_an_output_is_differentiated_in_the_graph_that_it_is_in(devices):
    model, before, behind = late_chain(len(devices)), nn.Linear(64, 64).double(), nn.Linear(64, 1).double()
    whole = nn.ModuleList([before, model, behind])
    reference = plain.twin(whole)
    before.to(devices[0])
    behind.to(devices[-1])
    first, middle, last = reference.children()
    with cut_on(devices, model, borders(len(devices))) as pipe:
        for aside in (False, True):
            x, _ = sample(16, 64)
            with torch.cuda.stream(torch.cuda.Stream()) if aside else torch.cuda.stream(None):
                behind(pipe(before(x.to(devices[0])))).square().sum().backward()
            torch.cuda.synchronize()
            given = first(x)
            last(torch.cat([middle(one) for one in given.split(4)])).square().sum().backward()
        plain.assert_close(gradients(whole), plain.gradients(reference), CLOSE)


def test_pinned_mini_batches_are_there_when_a_step_reads_them(devices):
    model = late_chain(len(devices))
    reference = plain.twin(model)
    given = [sample(16, 64) for _ in range(6)]
    with cut_on(devices, model, borders(len(devices)), nn.MSELoss()) as pipe:
        for x, y in given:
            pipe.step(x.pin_memory(), target=y.pin_memory())
    for x, y in given:
        plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
    plain.assert_close(gradients(model), plain.gradients(reference), CLOSE)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_asynchronous_schedules_keep_the_weights_of_each_micro_batch(devices, schedule):
    if len(devices) < 2:
        pytest.skip("for several workers")

    def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=0.01)

    stages = len(devices)
    model = plain.in_double([part for _ in range(stages) for part in (nn.Linear(5, 5), nn.LayerNorm(5))])
    oracle = DelayedTraining(copy.deepcopy(model), stages, schedule, adam)
    names = [name for name, _ in flatten(model)]
    plan = plan_by_hand(names, borders_of(stages), micro_batches=12, schedule=schedule)
    with Pipeline(model, on_devices(plan, devices), nn.MSELoss(), optimizer=adam) as pipe:
        for x, y in batches(4, samples=24):
            ours = pipe.step(x.to(devices[0]), target=y.to(devices[-1]))
            plain.assert_near(ours.cpu(), oracle.step(x, y, nn.MSELoss(), 12), CLOSE)
    theirs = [parameter for stage in oracle.stages for parameter in stage.parameters()]
    for parameter, expected in zip(model.parameters(), theirs, strict=True):
        plain.assert_near(parameter.detach().cpu(), expected.detach(), 1e-6)


def test_the_step_after_one_that_failed_gives_the_right_numbers(devices):
    chain, fails = late_chain(len(devices)), Fails()
    model = nn.Sequential(*chain, fails)
    reference = plain.twin(chain)
    x, y = sample(16, 64)
    with cut_on(devices, model, borders(len(devices)), nn.MSELoss()) as pipe:
        start = state(model)
        with pytest.raises(ArithmeticError, match="third call"):
            pipe.step(x.to(devices[0]), target=y.to(devices[-1]))
        model.load_state_dict(start)
        pipe.zero_grad()
        pipe.step(x.to(devices[0]), target=y.to(devices[-1]))
        plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
        plain.assert_close(gradients(chain), plain.gradients(reference), CLOSE)
