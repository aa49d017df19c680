"""What happens between two steps: the user changes the model, or a step fails."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipepart import Pipeline
from pipepart.capture import flatten
from tests.pipeline.conformance.runners import BACKENDS, LATE, Mode
from tests.support import plain

FAILURE, TO_DOUBLE = "failure", "float64"


def _of_parameters(change: Callable[[nn.Parameter], object]) -> Callable[[nn.Module], None]:
    @torch.no_grad()
    def changed(model: nn.Module) -> None:
        for parameter in model.parameters():
            change(parameter)

    return changed


def _scale_gradient(parameter: nn.Parameter) -> None:
    if parameter.grad is not None:
        parameter.grad = parameter.grad * 0.5


def _assigned(model: nn.Module) -> None:
    """Every parameter is another one, so that none is shared any more."""
    model.load_state_dict({name: tensor * 1.25 for name, tensor in model.state_dict().items()}, assign=True)


def _other_buffers(model: nn.Module) -> None:
    for buffer in model.buffers():
        if buffer.is_floating_point() and not buffer.is_sparse:
            buffer.mul_(1.25)


def _other_settings(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p:
            module.p = 0.8 - module.p
        elif isinstance(module, nn.LayerNorm):
            module.eps = 0.5


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda model: None,
    "values": _of_parameters(lambda parameter: parameter.mul_(1.25)),
    "untraced values": _of_parameters(lambda parameter: parameter.data.mul_(1.25)),
    "storage": _of_parameters(lambda parameter: setattr(parameter, "data", parameter.detach() * 1.25)),
    "gradients": _of_parameters(_scale_gradient),
    "frozen": lambda model: next(model.parameters()).requires_grad_(False),
    "assigned": _assigned,
    "buffers": _other_buffers,
    TO_DOUBLE: nn.Module.double,
    "settings": _other_settings,
    "evaluation": nn.Module.eval,
}


def drawn_event(mode: Mode) -> str:
    """Draw a change, or that a step fails, of those that the mode permits."""
    what = mode.what
    refused = set()
    if mode.runner in BACKENDS:
        return "nothing"
    if what.alone or what.writes or mode.runner == "optimizers of stages":
        refused |= {"assigned", FAILURE}
    if mode.replicas > 1 or mode.schedule[0] == "chimera":
        refused.add("assigned")
    if mode.dtype != torch.float32 or mode.runner == "optimizers of stages":
        refused.add(TO_DOUBLE)
    if what.recorded:
        refused.add(FAILURE)
    if mode.home in LATE and what.writes:
        refused.add("evaluation")  # the simulated devices do without batch norms that keep their statistics
    # Of a layer in several places, a hook counts as shared values; other objects for its tensors are not followed.
    if what.shared:
        refused |= {FAILURE, "assigned", TO_DOUBLE}
    return random.Random(f"between {mode}").choice(sorted({*CHANGES, FAILURE} - refused))


class Burnt(Exception):
    """Raised by a fuse."""


class Fuse:
    """Lets a step fail in one call of a layer, in its forward or its backward; layer and call are drawn."""

    def __init__(self, model: nn.Module, choose: random.Random, calls: int) -> None:
        self._calls = itertools.count()
        self._armed = self._burnt = False
        self._at, in_forward = choose.randrange(calls), choose.random() < 0.5
        _, layer = choose.choice(flatten(model))

        # A function, as replicas of the model share it.
        def hook(module: nn.Module, given: Any, output: Any) -> None:
            if in_forward:
                self._burn()
            for tensor in pytree.tree_leaves(output) if not in_forward else ():
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: self._burn())

        layer.register_forward_hook(hook)

    def _burn(self) -> None:
        if self._armed and next(self._calls) == self._at:
            self._burnt = True
            raise Burnt

    def check_failure(self, pipe: Pipeline, x: Any, y: Any) -> None:
        """Assert that what is raised arrives with its place, if the layer has such a call."""
        self._calls = itertools.count()
        self._armed, error = True, None
        try:
            plain.call(lambda *args, **kwargs: pipe.step(*args, target=y, **kwargs), x)
        except Burnt as raised:
            error = raised
        self._armed = False
        assert (error is not None) == self._burnt
        assert error is None or any("stage" in note and "micro-batch" in note for note in error.__notes__)
