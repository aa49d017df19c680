"""Parameters and buffers that layers of several stages share, such as an embedding's weight and the head's.

::

    stage 0 (embedding)   the parameter ◀── gradient of micro-batch k ── replica   stage 2 (head)
                            └─▶ .grad: head's + embedding's, added by autograd as it does without stages

The first stage that uses a parameter has the user's own. Every later one has a replica: an alias on the same device, or
a copy that is kept equal on another. A replica's gradient is sent micro-batch by micro-batch to the previous stage that
uses the parameter. It enters the graph there at the node where that stage's own gradient arrives. So the sums are those
of plain micro-batched training, the last use first, and the user's parameter and its hooks see the whole gradient.

A layer that uses a replica runs as a shadow: a shallow copy of the user's layer with other tensors. It takes over the
layer's settings, hooks and other tensors when a step begins, and gives back what its forward has set on itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...autograd.in_place import version
from ...capture import state_of

Layers = Sequence[tuple[str, nn.Module]]

_STATE = frozenset({"_parameters", "_buffers", "_modules"})


class GradientRoute(NamedTuple):
    """How the gradient of one shared parameter passes a stage.

    Attributes:
        number: of the parameter, the same in all its stages.
        tensor: what the stage's layers use: the parameter, or a replica.
        previous: the stage before this that uses it, which gets the gradient; None for the first.
        following: the stage after this that uses it, which sends a gradient; None for the last.
    """

    number: int
    tensor: Tensor
    previous: int | None
    following: int | None


class SharedParameters:
    """The tensors that one stage shares with others.

    Used by the caller between steps, and by the stage's worker at the end of a step.

    Args:
        layers: of the stage.
        device: where it runs.
        users: the stages that use each shared tensor.
        stage: its number.
        other_memory: stages that share no memory with this one, though torch sees the same device.

    Attributes:
        layers: of the stage; layers that use replicas are replaced by shadows.
    """

    def __init__(
        self,
        layers: Layers,
        device: torch.device,
        users: Mapping[Tensor, _Users],
        stage: int,
        other_memory: Set[int] = frozenset(),
    ) -> None:
        self._stage = stage
        self._users = users
        self._replicas = {
            tensor: _ReplicaParam(tensor, device, used.stages[0] in other_memory)
            for tensor, used in users.items()
            if used.stages[0] != stage
            and (
                isinstance(tensor, nn.Parameter) or tensor.device != device or used.stages[0] in other_memory
            )
        }
        self._shadows: dict[nn.Module, _ShadowModule] = {}
        self.layers = [(name, self._shadow(module)) for name, module in layers]
        self._buffers = [
            (f"{name}.{owner}" if owner else name, part._buffers, key, tensor)
            for name, module in layers
            for owner, part in module.named_modules()
            for key, tensor in part._buffers.items()
            if tensor is not None and tensor in users
        ]
        self._used: list[Tensor] = []  # the buffers or their replicas
        self._versions: list[int] = []
        self.refresh()

    def refresh(self) -> tuple[GradientRoute, ...]:
        """Take over the user's values and settings; return the routes of the shared parameters' gradients."""
        if not self._users:
            return ()
        with torch.inference_mode(False), torch.no_grad():
            values = {tensor: replica.refreshed() for tensor, replica in self._replicas.items()}
        for shadow in self._shadows.values():
            shadow.refresh(values)
        self._used = [values.get(tensor, tensor) for *_, tensor in self._buffers]
        self._versions = [version(tensor) for tensor in self._used]
        return tuple(
            GradientRoute(used.number, values.get(tensor, tensor), *used.neighbours(self._stage))
            for tensor, used in self._users.items()
            if isinstance(tensor, nn.Parameter)
        )

    def finish(self) -> None:
        """Copy attributes that shadows have set on themselves back to the layers.

        Raises:
            RuntimeError: a layer has written a shared buffer.
        """
        for shadow in self._shadows.values():
            shadow.give_back()
        for (name, owner, key, tensor), used, before in zip(
            self._buffers, self._used, self._versions, strict=True
        ):
            if owner.get(key) is not tensor or version(used) != before:
                raise RuntimeError(_written(f"{name}.{key}", self._users[tensor].stages))

    def _shadow(self, module: nn.Module) -> nn.Module:
        """The module, or its shadow if any of its tensors has a replica."""
        if module in self._shadows:
            return self._shadows[module].made
        if not any(tensor in self._replicas for tensor in state_of(module)):
            return module
        children = {
            name: None if child is None else self._shadow(child) for name, child in module._modules.items()
        }
        own_buffers = any(
            tensor in self._replicas for tensor in module._buffers.values() if tensor is not None
        )
        shadow = self._shadows[module] = _ShadowModule(module, children, own_buffers)
        return shadow.made


def share_parameters(
    groups: Sequence[Layers],
    devices: Sequence[torch.device],
    names: Sequence[str] | None = None,
    first: int = 0,
) -> list[SharedParameters]:
    """Return the shared tensors of each stage.

    The layers must be on their devices, and shared tensors on the device of the first stage that uses them.

    Args:
        groups: the layers of each stage.
        devices: where each stage runs.
        names: of the devices, if devices of different names share no memory; None if equal torch devices do.
        first: the number of the first stage.
    """
    users = _users_of(groups, first)
    return [
        SharedParameters(
            layers,
            device,
            {tensor: used for tensor, used in users.items() if index in used.stages},
            index,
            {stage for stage, name in enumerate(names or (), first) if name != (names or ())[index - first]},
        )
        for index, (layers, device) in enumerate(zip(groups, devices, strict=True), first)
    ]


def check_shared(groups: Sequence[Layers]) -> None:
    """Check that stages can share the tensors that they share.

    Raises:
        ValueError: a buffer that layers of several stages write, or a parameter of a TorchScript module.
    """
    users = _users_of(groups)
    for name, module in (layer for layers in groups for layer in layers):
        for path, part in module.named_modules(prefix=name):
            shared = [key for key, tensor in _tensors(part) if tensor in users]
            if shared and isinstance(part, torch.jit.ScriptModule):
                raise ValueError(
                    f"{path}.{shared[0]} is shared by layers of several stages, which a TorchScript module cannot "
                    "do: put them in one stage"
                )
            if "running_mean" in shared and isinstance(part, nn.modules.batchnorm._NormBase):
                statistics = part.get_buffer("running_mean")
                raise ValueError(_written(f"{path}.running_mean", users[statistics].stages))


def check_nothing_shared(groups: Sequence[Layers]) -> None:
    """Check that no parameter is shared, for stages that change their weights independently.

    Raises:
        ValueError: stages share a parameter.
    """
    names: dict[Tensor, str] = {}
    for name, module in (layer for layers in groups for layer in layers):
        for key, tensor in module.named_parameters(prefix=name):
            names.setdefault(tensor, key)
    for tensor, used in _users_of(groups).items():
        if tensor in names:
            raise ValueError(
                f"parameter {names[tensor]!r} is shared by layers of stages {', '.join(map(str, used.stages))}, and "
                "under an asynchronous schedule each stage changes its weights by itself: put these layers in one "
                "stage, or choose a synchronous schedule, such as '1f1b'"
            )


class _Users(NamedTuple):
    """The stages that use a tensor, in order, and the number of the tensor."""

    number: int
    stages: list[int]

    def neighbours(self, stage: int) -> tuple[int | None, int | None]:
        place = self.stages.index(stage)
        previous = self.stages[place - 1] if place else None
        return previous, self.stages[place + 1] if place + 1 < len(self.stages) else None


def _users_of(groups: Sequence[Layers], first: int = 0) -> dict[Tensor, _Users]:
    """Return the tensors that several stages use."""
    found: dict[Tensor, _Users] = {}
    for stage, layers in enumerate(groups, first):
        for _, module in layers:
            for tensor in state_of(module):
                stages = found.setdefault(tensor, _Users(len(found), [])).stages
                if stage not in stages:
                    stages.append(stage)
    return {tensor: used for tensor, used in found.items() if len(used.stages) > 1}


class _ReplicaParam:
    """A tensor's replica on one device: an alias there, or a copy on another device or in ``other_memory``."""

    def __init__(self, original: Tensor, device: torch.device, other_memory: bool) -> None:
        self._original = original
        self._device = device
        self._other_memory = other_memory
        self._value: Tensor | None = None
        self._seen: tuple[Any, ...] = ()

    def refreshed(self) -> Tensor:
        """Return the replica, with the original's current value and ``requires_grad``."""
        original = (
            self._original.detach()
        )  # shares the version counter, so that a write to either shows in both
        seen = (original.data_ptr(), original.dtype, original.shape, original.stride(), original.device)
        is_alias = original.device == self._device and not self._other_memory
        if self._value is None or seen != self._seen[1:]:
            self._value = original if is_alias else original.to(self._device, copy=True)
        elif not is_alias:
            # A write through `.data` does not change the version, so the values are copied at every step. A graph
            # that saved them may still wait for its backward, so only a write that is known changes the version.
            into = self._value.data if version(original) == self._seen[0] else self._value
            into.copy_(original)
        self._seen = version(original), *seen
        self._value.requires_grad_(self._original.requires_grad)
        self._value.grad = None
        return self._value


class _ShadowModule:
    """A shallow copy of a module with other tensors.

    Attributes:
        made: the copy.
    """

    def __init__(
        self, module: nn.Module, children: Mapping[str, nn.Module | None], own_buffers: bool
    ) -> None:
        self.made: nn.Module = object.__new__(type(module))
        self._module = module
        self._given: dict[str, Any] = {}
        buffers = {} if own_buffers else module._buffers  # a replaced buffer belongs to the user
        self.made.__dict__.update(_parameters={}, _buffers=buffers, _modules=dict(children))

    def refresh(self, values: Mapping[Tensor, Tensor]) -> None:
        """Take over the module's tensors or their replicas, and all other attributes."""
        self._given = {
            key: MethodType(value.__func__, self.made)
            if isinstance(value, MethodType) and value.__self__ is self._module
            else value
            for key, value in self._module.__dict__.items()
            if key not in _STATE
        }
        self.made.__dict__.update(self._given)
        self.made.__dict__["_parameters"] = _replaced(self._module._parameters, values)
        if self.made._buffers is not self._module._buffers:
            self.made._buffers.update(_replaced(self._module._buffers, values))

    def give_back(self) -> None:
        """Copy attributes that were set on the copy since :meth:`refresh` to the module."""
        for key, value in self.made.__dict__.items():
            if key not in _STATE and self._given.get(key, self) is not value:
                self._module.__dict__[key] = value


def _replaced(tensors: Mapping[str, Any], values: Mapping[Tensor, Tensor]) -> dict[str, Any]:
    return {
        name: tensor if tensor is None else values.get(tensor, tensor) for name, tensor in tensors.items()
    }


def _tensors(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for key, tensor in (*part._parameters.items(), *part._buffers.items()):
        if tensor is not None:
            yield key, tensor


def _written(buffer: str, stages: Sequence[int]) -> str:
    return (
        f"buffer {buffer} is shared by layers of stages {', '.join(map(str, stages))}, which write it at the same "
        "time: put them in one stage, or give each layer a buffer of its own"
    )
