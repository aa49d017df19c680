"""One micro-batch's place in recorded layers: static tensors, and what replays the forward and the backward on them.

::

    inputs ─▶ forward ─▶ outputs          gradients ─▶ backward ─▶ found: of the inputs, and of the weights
    (static)             (static)         (static)                 (static)

All of it is the slot's own, also what the layers keep from one to the other: recordings that share memory may only be
replayed in the order in which they were recorded, and micro-batches overlap in other orders. What goes in and out is
copied but for the gradients of weights, which autograd adds up before the slot is used again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..autograd import graph_cut
from ..loss import losses_of_stage
from .own_copy import tensors
from .regions import Together

Work = Callable[[], None]


class GraphRecorder(Protocol):
    """Records what functions launch on a device.

    Attributes:
        device: the device.
    """

    device: torch.device

    def memory(self) -> Any:
        """Memory for recordings that are replayed in their order, and in no other."""
        ...

    def record(self, work: Work, memory: Any) -> Work:
        """Calls a function once; returns what does again what it has launched, on the same tensors.

        The function may have done it by then, or not yet.
        """
        ...


class AddsLossError(ValueError):
    """A layer adds a loss where no replay would."""


class Slot:
    """A recording of layers for one micro-batch at a time. Used by the stage's worker.

    Args:
        run: runs the layers.
        value: an input like those to come.
        parameters: of the layers.
        recorder: records.

    Attributes:
        trained: the parameters that ask for a gradient.
        wanting: for each tensor of the output, whether it asks for one.

    Raises:
        AddsLossError: a layer adds a loss.
        RuntimeError: what the layers do cannot be recorded.
    """

    def __init__(
        self, run: Together, value: Any, parameters: Sequence[nn.Parameter], recorder: GraphRecorder
    ) -> None:
        self.trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._kind = recorder.device.type
        self._value = pytree.tree_map_only(Tensor, _static, value)
        self._inputs = tensors(self._value)
        memory = recorder.memory()
        try:
            self._forward = recorder.record(partial(self._run_forward, run), memory)
            made = tensors(self._made)
            self.wanting = [tensor.requires_grad for tensor in made]
            self._outputs = [tensor.detach() for tensor in made]
            self._gradients = [torch.zeros_like(tensor) for tensor in made if tensor.requires_grad]
            self._found: Sequence[Tensor | None] = [None for _ in self._wanted()]
            if self._gradients:
                self._backward = recorder.record(self._run_backward, memory)
        except AddsLossError:
            raise
        except Exception as error:
            raise RuntimeError(
                f"these layers cannot be recorded as CUDA graphs ({error}). A layer that waits for the device cannot, "
                "as .item(), .cpu() and an `if` on a tensor do: give it a forward hook, with which it runs by itself, "
                "or make the pipeline without cuda_graphs"
            ) from error
        # Without the graph of the recording, and what that has saved.
        self._made = pytree.tree_map_only(Tensor, Tensor.detach, self._made)

    def forward(self, given: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of the output for those of an input, in memory that is nobody else's."""
        with torch.no_grad():
            for static, tensor in zip(self._inputs, given, strict=True):
                static.copy_(tensor)
            self._forward()
            return [output.clone() for output in self._outputs]

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the inputs, and of the trained parameters, which are good until the next backward."""
        wanted = [gradient for gradient, wants in zip(gradients, self.wanting, strict=True) if wants]
        with torch.no_grad():
            for static, gradient in zip(self._gradients, wanted, strict=True):
                static.zero_() if gradient is None else static.copy_(gradient)
            self._backward()
            found = iter(self._found)
            of_inputs = [next(found) if tensor.requires_grad else None for tensor in self._inputs]
            copies = [None if gradient is None else gradient.clone() for gradient in of_inputs]
            # The very tensors, which are held here: so autograd copies one before it takes it for a weight's `grad`.
            return [*copies, *found]

    def output_with(self, made: Sequence[Tensor]) -> Any:
        """The output with these tensors in it."""
        given = iter(made)
        return pytree.tree_map_only(Tensor, lambda _: next(given), self._made)

    def _run_forward(self, run: Together) -> None:
        # Layers may write into their input, which autograd forbids on a leaf.
        with _uncached(self._kind), losses_of_stage() as added:
            self._made = run(graph_cut.alias(self._value))
        if added.found:
            raise AddsLossError(
                "a layer calls pipepart.add_loss, which no replay of a CUDA graph would: give it a forward hook, with "
                "which it runs by itself, or make the pipeline without cuda_graphs"
            )

    def _run_backward(self) -> None:
        outputs = [tensor for tensor in tensors(self._made) if tensor.requires_grad]
        with torch.autocast(self._kind, enabled=False):
            self._found = torch.autograd.grad(outputs, self._wanted(), self._gradients, allow_unused=True)

    def _wanted(self) -> list[Tensor]:
        return [*(tensor for tensor in self._inputs if tensor.requires_grad), *self.trained]


def _static(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _uncached(kind: str) -> AbstractContextManager[object]:
    """The present autocast without its cache: casts of weights in a recording are no good outside of it."""
    if not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=False)
