"""Replicas of the model: deep copies of the user's layers, which follow their values and return their gradients.

::

    stage s of the model     values and settings ──copied──▶ stage s of replica k
    the user's .grad      ◀── added, replica by replica ───── its own .grad, then none

The user's model is replica 0. Further replicas are deep copies that share no tensor with it. Before each step their
parameters and buffers are set to the values of the user's layers: all of them, as a write through ``.data`` cannot be
detected.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..replay.buffers import Buffers, Noted

Layers = Sequence[tuple[str, nn.Module]]
Gradients = list[Tensor | None]

# Types of layer attributes that a replica copies, such as ``training``.
_PLAIN = (bool, int, float, str, type(None))
_ONE_COPY = "plan with one copy of the model: replicas=1, and another schedule than 'chimera'"


def copied_groups(groups: Sequence[Layers]) -> list[Layers]:
    """Return deep copies of the layers. Tensors that layers share are shared by the copies too.

    Raises:
        ValueError: a layer cannot be copied, is TorchScript, or draws from a generator of its own.
    """
    memo: dict[int, Any] = {}
    return [[(name, _copied(name, layer, memo)) for name, layer in layers] for layers in groups]


def _copied(name: str, layer: nn.Module, memo: dict[int, Any]) -> nn.Module:
    what = f"layer {name!r} ({type(layer).__name__})"
    for part in layer.modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise ValueError(
                f"{what} is TorchScript, whose copies compute with the parameters of the first: {_ONE_COPY}"
            )
        for key, value in vars(part).items():
            if isinstance(value, torch.Generator):
                raise ValueError(
                    f"{what} has a random generator of its own, {key!r}, from which each copy of the model would draw "
                    f"the same numbers: let it draw from torch's, or {_ONE_COPY}"
                )
    try:
        return copy.deepcopy(layer, memo)
    except Exception as error:
        raise ValueError(f"{what} cannot be copied ({error}): {_ONE_COPY}") from error


class CopiedLayers:
    """The layers of a stage, and their copies in a further replica of the model.

    The caller begins a run and the stage's worker ends it. In between only the worker uses the copies.

    Args:
        originals: the user's layers.
        copies: of them.
        device: where the copies are.
        elsewhere: the user's parameters whose gradients another stage hands over.
    """

    def __init__(
        self, originals: Layers, copies: Layers, device: torch.device, elsewhere: Iterable[Tensor] = ()
    ) -> None:
        self._layers = [(name, layer, _structure(layer)) for name, layer in originals]
        self._device = device
        self._parts = [
            (f"{name}.{path}" if path else name, theirs, own)
            for (name, layer), (_, copied) in zip(originals, copies, strict=True)
            for (path, theirs), own in zip(layer.named_modules(), copied.modules(), strict=True)
        ]
        self._parameters: dict[nn.Parameter, nn.Parameter] = {
            theirs: own
            for _, original, copied in self._parts
            for theirs, own in zip(original._parameters.values(), copied._parameters.values(), strict=True)
            if theirs is not None and own is not None
        }
        others = set(elsewhere)
        self._handed_over = [theirs for theirs in self._parameters if theirs not in others]
        self._buffers = Buffers(copies)
        self._noted: Noted | None = None

    def begin(self, forward: bool, backward: bool) -> None:
        """Set the copies to the values of the layers, before a run.

        Args:
            forward: whether the run has forwards.
            backward: whether it, or a run that follows it, has backwards.

        Raises:
            ValueError: a layer was replaced, would write its buffers, or has a parameter with a hook, which would see
                the gradients of one replica only.
        """
        for own in self._parameters.values():
            own.grad = None  # left by a run that failed
        if backward:
            self._refuse_hooks()
        if forward:
            self._refuse_changes()
            self._refuse_statistics()
            with torch.inference_mode(False), torch.no_grad():
                self._follow()
                self._noted = self._buffers.note()

    def finish(self) -> None:
        """Check after the last forward of a run that no buffer was written.

        Raises:
            ValueError: a layer has written a buffer.
        """
        noted, self._noted = self._noted, None
        written = self._buffers.written(noted) if noted else []
        if written:
            raise ValueError(_writes(written[0]))

    def hand_over(self) -> Gradients:
        """Return the gradients of the copied parameters and clear them."""
        found: Gradients = []
        for theirs in self._handed_over:
            own = self._parameters[theirs]
            found.append(own.grad)
            own.grad = None
        return found

    def add(self, gradients: Gradients) -> None:
        """Add the handed over gradients to those of the user's parameters, on the worker of the first replica."""
        with torch.no_grad():
            for theirs, gradient in zip(self._handed_over, gradients, strict=True):
                if gradient is None:
                    continue
                here = gradient.to(theirs.device)
                if theirs.grad is None:
                    theirs.grad = here
                else:
                    theirs.grad.add_(here)

    def _follow(self) -> None:
        for theirs, own in self._parameters.items():
            if own.requires_grad != theirs.requires_grad:
                own.requires_grad_(theirs.requires_grad)
            if _alike(own, theirs):
                # Through `.data`: a graph that saved these values may still wait for its backward.
                own.data.copy_(theirs.data)
            else:
                own.data = theirs.detach().to(own.device, copy=True)
            if own.device != self._device:  # for what stands in for it here, and looks at its version
                torch.autograd.graph.increment_version(own)
        for _, original, copied in self._parts:
            for key, value in vars(original).items():
                if isinstance(value, _PLAIN):
                    vars(copied)[key] = value
                elif (
                    isinstance(value, Tensor) and not value.requires_grad
                ):  # in no place that a graph may have saved
                    vars(copied)[key] = self._moved(value)
            for key, buffer in original._buffers.items():
                own = copied._buffers.get(key)
                if buffer is not None and own is not None and _alike(own, buffer):
                    own.data.copy_(buffer.data)
                else:
                    copied._buffers[key] = None if buffer is None else self._moved(buffer)

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self._device, copy=True)

    def _refuse_changes(self) -> None:
        for name, layer, before in self._layers:
            now = _structure(layer)
            if len(now) != len(before) or any(
                one is not other for one, other in zip(now, before, strict=True)
            ):
                raise ValueError(
                    f"layer {name!r} ({type(layer).__name__}) has other modules or parameters than when it was "
                    "copied: make the pipeline after changing the model"
                )

    def _refuse_statistics(self) -> None:
        for name, part, _ in self._parts:
            if (
                isinstance(part, nn.modules.batchnorm._NormBase)
                and part.training
                and part.track_running_stats
            ):
                raise ValueError(_writes(f"{name}.running_mean"))

    def _refuse_hooks(self) -> None:
        for name, part, _ in self._parts:
            for key, parameter in part._parameters.items():
                if parameter is None or not parameter.requires_grad:
                    continue
                if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                    raise ValueError(
                        f"parameter '{name}.{key}' has a hook, which would see the gradients of one copy of the model "
                        f"and not their sum: remove it and use the gradient after the step, or {_ONE_COPY}"
                    )


def _structure(layer: nn.Module) -> list[object]:
    """Return the modules and parameters of a layer, which must not change while copies exist."""
    return [item for part in layer.modules() for item in (part, *part._parameters.values())]


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()


def _writes(buffer: str) -> str:
    layer, _, name = buffer.rpartition(".")
    return (
        f"layer {layer!r} writes its buffer {name!r} in the forward, and each copy of the model would see its own "
        f"micro-batches only: {_ONE_COPY}, or put the layer in evaluation mode"
    )
