"""Shadows: copies of modules that use other tensors than the user's modules, but follow their settings.

A stage runs shadows in two cases. A parameter that an earlier stage uses as well has a replica here, for a gradient of
its own: modules that use it are copied shallowly, as only this tensor is another one. In a further replica of the model
every tensor is a copy, and modules are copied deeply, as another worker runs the same module at the same time::

    the user's module     parameters, buffers ──refreshed()──▶ replicas                    in the shadow
                          other attributes ──────────────────▶ the same attributes         of a shallow copy
                          numbers, text, tensors ────────────▶ followed; the rest its own  of a deep copy

A shadow has the class of its module, so the module's own code runs. It takes over values and settings at every step.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from operator import is_
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ...autograd.in_place import version
from ...capture import state_of
from ...input_error import InputError

Layers = Sequence[tuple[str, nn.Module]]
Values = Mapping[Tensor, Tensor]  # replicas, by the user's tensor

_STATE = frozenset({"_parameters", "_buffers", "_modules"})
ONE_COPY = "plan with one copy of the model: replicas=1, and another schedule than 'chimera'"
_PLAIN = (bool, int, float, str, type(None))


class ReplicaParam:
    """The replica of a parameter or buffer on one device: an alias, or a copy that is kept equal.

    Args:
        original: the user's tensor.
        device: where the replica is.
        own_memory: whether it is a copy even if the original is on the same device.
        defers: whether a split backward may compute its gradient in W: no other stage waits for it.
    """

    def __init__(
        self, original: Tensor, device: torch.device, own_memory: bool, defers: bool = False
    ) -> None:
        self._original = original
        self._device = device
        self._own_memory = own_memory
        self._defers = defers and type(original) is nn.Parameter
        self._value: Tensor | None = None
        self._version = 0
        self._memory: tuple[Any, ...] = ()

    @property
    def value(self) -> Tensor | None:
        """The replica; None before the first step."""
        return self._value

    def refreshed(self) -> Tensor:
        """Return the replica, with the original's value and ``requires_grad``. A copy is always the same object."""
        original = self._original.detach()  # shares the version counter: a write to either shows in both
        is_alias = original.device == self._device and not self._own_memory
        memory = _memory(original)
        if self._value is None or memory != self._memory or original.layout is not torch.strided:
            if is_alias or self._value is None:
                self._value = original if is_alias else original.to(self._device, copy=True)
                if self._defers:  # which only parameters are
                    self._value = nn.Parameter(self._value, requires_grad=False)
            else:
                self._value.data = original.to(self._device, copy=True)
        elif not is_alias:
            # A write through `.data` does not change the version, so the values are copied at every step. A graph
            # that saved them may still wait for its backward, so only a write that is known changes the version.
            into = self._value.data if version(original) == self._version else self._value
            into.copy_(original)
        self._version, self._memory = version(original), memory
        self._value.requires_grad_(self._original.requires_grad)
        self._value.grad = None
        return self._value


class Shadows:
    """The layers of a stage, with shadows for modules that use replicas.

    Args:
        layers: the user's.
        replicas: of tensors, by the user's tensor.
        replica_on: the device of a stage of a further replica of the model, whose modules are all copied deeply.
        in_several: modules that other stages run, too, and whose tensors must therefore stay the same.

    Attributes:
        layers: what the stage runs, under the same names.
    """

    def __init__(
        self,
        layers: Layers,
        replicas: Mapping[Tensor, ReplicaParam],
        replica_on: torch.device | None = None,
        in_several: Collection[nn.Module] = (),
    ) -> None:
        self._replicas = replicas
        self._replica_on = replica_on
        self._in_several = in_several
        self._made: dict[nn.Module, nn.Module] = {}
        self._given: dict[nn.Module, dict[str, Any]] = {}
        if replica_on is None:
            self.layers = [(name, self._shallow(layer)) for name, layer in layers]
        else:
            memo: dict[int, Any] = {id(tensor): replica for tensor, replica in self._values().items()}
            self.layers = [(name, _deep_copy(name, layer, memo)) for name, layer in layers]
            for (_, layer), (_, shadow) in zip(layers, self.layers, strict=True):
                self._made.update(zip(layer.modules(), shadow.modules(), strict=True))
        self._structures = [(name, layer, self._structure(layer)) for name, layer in layers]
        self.refresh()

    def refresh(self) -> Values:
        """Take over the user's values and settings; return the replicas."""
        if not self._made:
            return {}
        for name, layer, before in self._structures:
            now = self._structure(layer)
            if len(now) != len(before) or not all(map(is_, now, before)):
                raise InputError(
                    f"layer {name!r} ({type(layer).__name__}), whose tensors several stages use, has other modules, "
                    "parameters or buffers than when the pipeline was made: make it after changing the model, and load "
                    "values without assign=True"
                )
        values = self._values()
        with torch.inference_mode(False), torch.no_grad():
            for module, shadow in self._made.items():
                self._follow(module, shadow, values)
        return values

    def give_back(self) -> None:
        """Set what a forward has set on a shallow copy on the user's module, too.

        What refers to replicas, such as the flat weights of a recurrent layer, stays in the copy: another stage may run
        the user's module meanwhile, and its gradient would go to the replicas.
        """
        values = {id(value) for replica in self._replicas.values() if (value := replica.value) is not None}
        for module, values_before in self._given.items():
            for key, value in vars(self._made[module]).items():
                if (
                    key not in _STATE
                    and values_before.get(key, self) is not value
                    and not _refers_to(value, values)
                ):
                    vars(module)[key] = value

    def _values(self) -> Values:
        with torch.inference_mode(False), torch.no_grad():
            return {tensor: replica.refreshed() for tensor, replica in self._replicas.items()}

    def _shallow(self, module: nn.Module) -> nn.Module:
        """Return a shallow copy of a module if it uses replicas, else the module."""
        if module in self._made:
            return self._made[module]
        if not any(tensor in self._replicas for tensor in (*module.parameters(), *module.buffers())):
            return module
        shadow = self._made[module] = object.__new__(type(module))
        # A module without a replica among its buffers writes the user's.
        own_buffers = any(tensor in self._replicas for tensor in module._buffers.values())
        vars(shadow)["_buffers"] = {} if own_buffers else module._buffers
        vars(shadow)["_modules"] = {
            name: None if child is None else self._shallow(child) for name, child in module._modules.items()
        }
        return shadow

    def _structure(self, layer: nn.Module) -> list[object]:
        """Return what must stay the same in a layer: its modules, and tensors that would not be followed."""
        if layer not in self._made:
            return []
        if self._replica_on is not None:
            return [*layer.modules(), *layer.parameters()]
        fixed = (module for module in layer.modules() if module in self._in_several)
        return [*layer.modules(), *(tensor for module in fixed for tensor in state_of(module))]

    def _follow(self, module: nn.Module, shadow: nn.Module, values: Values) -> None:
        values_now = {
            key: self._tensor(value, values) if isinstance(value, Tensor) else self._linked(value, values)
            for key, value in vars(module).items()
            if key not in _STATE and (self._replica_on is None or isinstance(value, (*_PLAIN, Tensor)))
        }
        for key in self._given.get(module, {}).keys() - values_now.keys():  # the user has deleted it
            vars(shadow).pop(key, None)
        self._given[module] = values_now
        vars(shadow).update(values_now, _parameters=self._tensors(module._parameters, values))
        if shadow._buffers is not module._buffers:
            buffers = self._tensors(module._buffers, values)
            shadow._buffers.clear()  # in place: others hold this dict
            shadow._buffers.update(buffers)

    def _tensors(self, tensors: Mapping[str, Tensor | None], values: Values) -> dict[str, Tensor | None]:
        return {
            key: tensor if tensor is None else self._tensor(tensor, values) for key, tensor in tensors.items()
        }

    def _tensor(self, tensor: Tensor, values: Values) -> Tensor:
        """Return the replica of a tensor; on a replica of the model, a copy of any other that is not trained."""
        if tensor in values or self._replica_on is None or tensor.requires_grad:
            return values.get(tensor, tensor)
        return tensor.detach().to(self._replica_on, copy=True)

    def _linked(self, value: Any, values: Values) -> Any:
        """Return an attribute, with replicas for tensors, shadows for modules, and methods of shadows for methods."""
        if isinstance(value, Tensor):
            return values.get(value, value)
        if isinstance(value, nn.Module):
            return self._made.get(value, value)
        if isinstance(value, MethodType):
            owner = self._linked(value.__self__, values)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if type(value) is list:  # of weights, for example
            items = [self._linked(item, values) for item in value]
            return value if all(map(is_, items, value)) else items
        if type(value) is OrderedDict:  # hooks
            hooks = OrderedDict((key, self._linked(hook, values)) for key, hook in value.items())
            return value if all(map(is_, hooks.values(), value.values())) else hooks
        return value


def _refers_to(value: Any, tensors: Collection[int]) -> bool:
    """Return True if a value is one of these tensors, by identity, or refers or leads to one by a list."""
    if isinstance(value, list | tuple):
        return any(_refers_to(item, tensors) for item in value)
    return id(value() if isinstance(value, weakref.ref) else value) in tensors


def _deep_copy(name: str, layer: nn.Module, memo: dict[int, Any]) -> nn.Module:
    try:
        return copy.deepcopy(layer, memo)
    except Exception as error:
        raise InputError(
            f"layer {name!r} ({type(layer).__name__}) cannot be copied ({error}): {ONE_COPY}"
        ) from error


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """What changes when a tensor gets other memory, or its memory another meaning."""
    if tensor.layout is not torch.strided:
        return ()
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device
