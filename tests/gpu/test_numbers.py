"""Steps on GPUs have the numbers of the plain model on the CPU, up to the order in which kernels sum."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.gpu.late import CYCLES
from tests.pipeline.conformance.runners import AMONG_DEVICES, CUDA, Mode, covering
from tests.pipeline.conformance.test_conformance import check

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
