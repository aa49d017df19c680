"""A stage: its layers on its device, and one autograd graph for each micro-batch in flight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from .. import boundary
from .blame import failed_layers
from .input_gradients import Awaited, InputGradients
from .notes import LAYER, add_note
from .randomness import Draws, may_draw


class Stash(NamedTuple):
    """What a stage keeps of one micro-batch from its forward to its backward.

    Attributes:
        inputs: the gradients of its input, for which the stage before waits.
        roots: where gradients of its output enter its graph.
        nodes: the autograd node of each layer's output, to name the layer whose backward fails.
    """

    inputs: Awaited
    roots: tuple[GradientEdge, ...]
    nodes: tuple[Node | None, ...]


class Stage:
    """The layers of one stage, the first of which is layer ``first`` of the model. Only its worker calls it."""

    def __init__(
        self,
        index: int,
        layers: Sequence[tuple[str, nn.Module]],
        first: int,
        device: torch.device,
        where: str,
    ) -> None:
        self.index = index
        self.first = first
        self.layers = tuple(layers)
        self.device = device
        self.where = where
        self._modules = [module for _, module in layers]
        self._input_gradients = InputGradients()
        # Whether a layer draws random numbers, by its place and mode; else known once it has run in that mode.
        self._draws: dict[tuple[int, bool], bool] = {
            (index, True): True for index, module in enumerate(self._modules) if may_draw(module)
        }
        # Autograd forbids writing into a leaf, so a stage that does gets its input under an alias. Whether it does
        # is seen at the first micro-batch of each mode, training or not; a flag named `inplace` is believed.
        flags = (getattr(part, "inplace", False) for module in self._modules for part in module.modules())
        self._writes_input = dict.fromkeys((False, True), True) if any(flags) else {}

    def forward(self, message: Any, micro_batch: int, draws: Draws) -> tuple[Any, Awaited, list[Node | None]]:
        """Runs the layers; returns their output, the input's gradients to come, and a node for each layer's output."""
        message = boundary.move(message, self.device)
        nodes: list[Node | None] = []
        inputs = boundary.leaves(message) if torch.is_grad_enabled() else ()
        awaited = self._input_gradients.await_for(inputs)
        training = self._modules[0].training
        if not inputs or self._writes_input.get(training) is False:
            return self._run(message, nodes, micro_batch, draws), awaited, nodes
        versions = [leaf._version for leaf in inputs]
        value = self._run(boundary.alias(message), nodes, micro_batch, draws)
        if training not in self._writes_input:
            self._writes_input[training] = versions != [leaf._version for leaf in inputs]
        return value, awaited, nodes

    def backward(self, stash: Stash, gradients: boundary.Gradients) -> list[Tensor | None]:
        """Runs the backward of one micro-batch; returns the gradients of its inputs."""
        try:
            boundary.backward(stash.roots, boundary.move_gradients(gradients, self.device))
        except BaseException as error:
            add_note(error, f"{LAYER}in the backward of {self._name(failed_layers(stash.nodes, error))}")
            raise
        return self._input_gradients.collect(stash.inputs)

    def _run(self, value: Any, nodes: list[Node | None], micro_batch: int, draws: Draws) -> Any:
        try:
            for index, module in enumerate(self._modules):
                if self._draws.get((index, module.training)) is False:
                    value = module(value)
                else:
                    with draws.of(self.first + index, micro_batch) as own:
                        value = module(value)
                    self._draws.setdefault((index, module.training), own.count > 0)
                nodes.append(getattr(value, "grad_fn", None))
        except BaseException as error:
            add_note(error, f"{LAYER}in the forward of {self._name([len(nodes)])}")
            raise
        return value

    def _name(self, indices: Sequence[int]) -> str:
        named = [f"layer {name!r} ({type(module).__name__})" for name, module in self.layers]
        return " or ".join([*named, "the loss"][index] for index in indices)
