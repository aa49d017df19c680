"""Replicas of the model: stages of shadow modules, which follow the user's layers and return gradients to them.

::

    stage s of the model     values and settings ──────────▶ stage s of replica k
    the user's .grad      ◀── added, replica by replica ───── its own .grad, then none

The user's model is replica 0. The tensors of further replicas are copies. Before each step they are set to the values
of the user's layers: all of them, as a write through ``.data`` cannot be detected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ...autograd import graph_cut
from ...capture import state_of
from ...input_error import InputError
from ..replay.buffers import Buffers, Noted
from .shadow import ONE_COPY, Layers, ReplicaParam, Shadows
from .shared_parameters import GradientRoute, SharedParameters, users_of

Gradients = list[Tensor | None]


def replicate(
    groups: Sequence[Layers], devices: Sequence[torch.device], first: int
) -> list[SharedParameters]:
    """Return the layers of each stage of a further replica, on its devices; arguments are those of share_parameters.

    Raises:
        ValueError: a layer cannot be copied, is TorchScript, or draws from a generator of its own.
    """
    users = users_of(groups, first)
    replicated = []
    for stage, (layers, device) in enumerate(zip(groups, devices, strict=True), first):
        replicas = {
            tensor: ReplicaParam(tensor, device, True, tensor not in users) for tensor in tensors_of(layers)
        }
        for name, layer in layers:
            _check_copyable(name, layer)
        replicated.append(Replica(layers, Shadows(layers, replicas, device), users, stage))
    return replicated


def _check_copyable(name: str, layer: nn.Module) -> None:
    what = f"layer {name!r} ({type(layer).__name__})"
    for part in layer.modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise InputError(
                f"{what} is TorchScript, whose copies compute with the parameters of the first: {ONE_COPY}"
            )
        for key, value in vars(part).items():
            if isinstance(value, torch.Generator):
                raise InputError(
                    f"{what} has a random generator of its own, {key!r}, from which each copy of the model would draw "
                    f"the same numbers: let it draw from torch's, or {ONE_COPY}"
                )


class Replica(SharedParameters):
    """The layers of a stage of a further replica of the model, which follow the user's and return their gradients.

    The caller begins a run and the stage's worker ends it. In between only the worker uses the stage.
    """

    def __init__(
        self, originals: Layers, shadows: Shadows, users: Mapping[Tensor, Sequence[int]], stage: int
    ) -> None:
        super().__init__(originals, shadows, users, stage)
        self._own_buffers = Buffers(self.layers)
        self._noted: Noted | None = None

    def begin(self, forward: bool, backward: bool) -> None:
        """Check the user's layers before a run, as :func:`refuse_copies`."""
        refuse_copies(self.originals, forward, backward)

    def refresh(self) -> tuple[GradientRoute, ...]:
        """Take over the user's values and settings, before the first forward of a run."""
        routes = super().refresh()
        self._noted = self._own_buffers.note()
        return routes

    def finish(self) -> None:
        """Check after the last forward of a run that no buffer was written.

        Raises:
            ValueError: a layer has written a buffer.
        """
        noted, self._noted = self._noted, None
        written = self._own_buffers.written(noted) if noted else []
        if written:
            raise InputError(_writes(written[0]))

    def hand_over(self) -> Gradients:
        """Return the gradients of the replica's parameters and clear them."""
        gradients: Gradients = []
        for value in self.values.values():
            gradients.append(value.grad)
            value.grad = None
        return gradients


@torch.no_grad()
def add_gradients(layers: Layers, gradients: Gradients) -> None:
    """Add the gradients that a replica of layers has handed over to those of the user's parameters."""
    for theirs, gradient in zip(tensors_of(layers), gradients, strict=True):
        if gradient is None:
            continue
        here = graph_cut.move(gradient, theirs.device)
        if theirs.grad is None:
            theirs.grad = here
        else:
            theirs.grad.add_(here)


def tensors_of(layers: Layers) -> list[Tensor]:
    """Return the parameters and buffers of layers, each once."""
    return list(dict.fromkeys(tensor for _, layer in layers for tensor in state_of(layer)))


def refuse_copies(layers: Layers, forward: bool, backward: bool) -> None:
    """Check that layers can run in several replicas of which only the first is the user's.

    Args:
        layers: the user's.
        forward: whether the run has forwards.
        backward: whether it, or a run that follows it, has backwards.

    Raises:
        ValueError: a layer would write its buffers, or has a parameter with a hook, which would see the gradients of
            one replica only.
    """
    for name, layer in layers:
        for path, part in layer.named_modules(prefix=name):
            if backward:
                _refuse_hooks_of(path, part)
            is_norm = isinstance(part, nn.modules.batchnorm._NormBase)
            if forward and is_norm and part.training and part.track_running_stats:
                raise InputError(_writes(f"{path}.running_mean"))


def _refuse_hooks_of(name: str, part: nn.Module) -> None:
    for key, parameter in part._parameters.items():
        if parameter is None or not parameter.requires_grad:
            continue
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise InputError(
                f"parameter '{name}.{key}' has a hook, which would see the gradients of one copy of the model and not "
                f"their sum: remove it and use the gradient after the step, or {ONE_COPY}"
            )


def _writes(buffer: str) -> str:
    layer, _, name = buffer.rpartition(".")
    return (
        f"layer {layer!r} writes its buffer {name!r} in the forward, and each copy of the model would see its own "
        f"micro-batches only: {ONE_COPY}, or put the layer in evaluation mode"
    )
