"""Parameters and buffers that layers of several stages share.

::

    stage 0 (embedding)   the parameter ◀── gradient of micro-batch k ── stand-in   stage 2 (head)
                            └─▶ .grad: head's + embedding's, added by autograd as it does without stages

The first stage that uses a parameter has the user's own, every later one a stand-in: on the same device an alias of
it, on another a copy that is kept equal. A stand-in's gradient goes back micro-batch by micro-batch and enters the
graph of the stage before that uses the parameter, at the very node where that stage's own gradient arrives. So the sums
are those of plain micro-batched training, the last use first, and the user's parameter and its hooks see them whole.

A layer with a stand-in in it stands in for the user's layer, which stays as it is: it has the user's settings, hooks
and other tensors, taken over when a run begins, and gives back what its forward has set on itself.
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

_OWN = frozenset({"_parameters", "_buffers", "_modules"})


class Link(NamedTuple):
    """A stage's part in one shared parameter.

    Attributes:
        number: of the parameter, the same in all its stages.
        tensor: what the stage's layers use: the parameter, or a stand-in.
        before: the stage before this that uses it, which takes the gradient; None for the first.
        behind: the stage behind this that uses it, from which a gradient comes; None for the last.
    """

    number: int
    tensor: Tensor
    before: int | None
    behind: int | None


class Ties:
    """What one stage shares with others. Used by the caller between runs, and by the stage's worker at their ends.

    Args:
        layers: the stage's.
        device: where it runs.
        chains: the tensors that it shares.
        stage: its number.
        elsewhere: stages whose memory is not this one's, be the device the same to torch.

    Attributes:
        layers: the stage's, with layers that stand in for some.
    """

    def __init__(
        self,
        layers: Layers,
        device: torch.device,
        chains: Mapping[Tensor, _Chain],
        stage: int,
        elsewhere: Set[int] = frozenset(),
    ) -> None:
        self._stage = stage
        self._chains = chains
        self._stand_ins = {
            tensor: _StandIn(tensor, device, chain.stages[0] in elsewhere)
            for tensor, chain in chains.items()
            if chain.stages[0] != stage
            and (isinstance(tensor, nn.Parameter) or tensor.device != device or chain.stages[0] in elsewhere)
        }
        self._twins: dict[nn.Module, _Twin] = {}
        self.layers = [(name, self._twin(module)) for name, module in layers]
        self._buffers = [
            (f"{name}.{owner}" if owner else name, part._buffers, key, tensor)
            for name, module in layers
            for owner, part in module.named_modules()
            for key, tensor in part._buffers.items()
            if tensor is not None and tensor in chains
        ]
        self._used: list[Tensor] = []  # of the buffers, or what stands in for them
        self._versions: list[int] = []

    def refresh(self) -> tuple[Link, ...]:
        """Takes over the user's values and settings; returns the parts in the shared parameters that need it."""
        if not self._chains:
            return ()
        with torch.inference_mode(False), torch.no_grad():
            values = {tensor: stand_in.refreshed() for tensor, stand_in in self._stand_ins.items()}
        for twin in self._twins.values():
            twin.refresh(values)
        self._used = [values.get(tensor, tensor) for *_, tensor in self._buffers]
        self._versions = [version(tensor) for tensor in self._used]
        return tuple(
            Link(chain.number, values.get(tensor, tensor), *chain.neighbours(self._stage))
            for tensor, chain in self._chains.items()
            if isinstance(tensor, nn.Parameter)
        )

    def finish(self) -> None:
        """Gives back what layers have set on themselves.

        Raises:
            RuntimeError: a layer has written a shared buffer.
        """
        for twin in self._twins.values():
            twin.give_back()
        for (name, owner, key, tensor), used, before in zip(
            self._buffers, self._used, self._versions, strict=True
        ):
            if owner.get(key) is not tensor or version(used) != before:
                raise RuntimeError(_written(f"{name}.{key}", self._chains[tensor].stages))

    def _twin(self, module: nn.Module) -> nn.Module:
        """The module, or one that stands in for it where it has tensors that have a stand-in."""
        if module in self._twins:
            return self._twins[module].made
        if not any(tensor in self._stand_ins for tensor in state_of(module)):
            return module
        children = {
            name: None if child is None else self._twin(child) for name, child in module._modules.items()
        }
        own_buffers = not self._stand_ins.keys().isdisjoint(
            tensor for tensor in module._buffers.values() if tensor is not None
        )
        twin = self._twins[module] = _Twin(module, children, own_buffers)
        return twin.made


def tie(
    groups: Sequence[Layers],
    devices: Sequence[torch.device],
    names: Sequence[str] | None = None,
    first: int = 0,
) -> list[Ties]:
    """What each stage shares with others. The layers must be on their devices, shared ones on that of their first.

    Args:
        groups: the layers of each stage.
        devices: where each stage runs.
        names: of the devices, if those of other names share no tensors though they may share their memory.
        first: the number of the first stage.
    """
    chains = _chains(groups, first)
    return [
        Ties(
            layers,
            device,
            {t: chain for t, chain in chains.items() if index in chain.stages},
            index,
            {stage for stage, name in enumerate(names or (), first) if name != (names or ())[index - first]},
        )
        for index, (layers, device) in enumerate(zip(groups, devices, strict=True), first)
    ]


def check_ties(groups: Sequence[Layers]) -> None:
    """Refuses what stages cannot share.

    Raises:
        ValueError: a buffer that layers of several stages write, or a parameter of a TorchScript module.
    """
    chains = _chains(groups)
    for layers in groups:
        for name, module in layers:
            for path, part in module.named_modules(prefix=name):
                shared = [key for key, tensor in _tensors(part) if tensor in chains]
                if shared and isinstance(part, torch.jit.ScriptModule):
                    raise ValueError(
                        f"{path}.{shared[0]} is shared by layers of several stages, which a TorchScript module cannot "
                        "do: put them in one stage"
                    )
                if "running_mean" in shared and isinstance(part, nn.modules.batchnorm._NormBase):
                    statistics = part.get_buffer("running_mean")
                    raise ValueError(_written(f"{path}.running_mean", chains[statistics].stages))


def check_untied(groups: Sequence[Layers]) -> None:
    """Refuses parameters that stages share, for stages whose weights change apart from each other.

    Raises:
        ValueError: there is one.
    """
    names: dict[Tensor, str] = {}
    for name, module in (layer for layers in groups for layer in layers):
        for key, tensor in module.named_parameters(prefix=name):
            names.setdefault(tensor, key)
    for tensor, chain in _chains(groups).items():
        if tensor in names:
            raise ValueError(
                f"parameter {names[tensor]!r} is shared by layers of stages {', '.join(map(str, chain.stages))}, and "
                "under an asynchronous schedule each stage changes its weights by itself: put these layers in one "
                "stage, or choose a synchronous schedule, such as '1f1b'"
            )


class _Chain(NamedTuple):
    """The stages that use a tensor, in their order."""

    number: int
    stages: list[int]

    def neighbours(self, stage: int) -> tuple[int | None, int | None]:
        place = self.stages.index(stage)
        before = self.stages[place - 1] if place else None
        return before, self.stages[place + 1] if place + 1 < len(self.stages) else None


def _chains(groups: Sequence[Layers], first: int = 0) -> dict[Tensor, _Chain]:
    """The tensors that several stages use."""
    found: dict[Tensor, _Chain] = {}
    for stage, layers in enumerate(groups, first):
        for _, module in layers:
            for tensor in state_of(module):
                stages = found.setdefault(tensor, _Chain(len(found), [])).stages
                if stage not in stages:
                    stages.append(stage)
    return {tensor: chain for tensor, chain in found.items() if len(chain.stages) > 1}


class _StandIn:
    """What stands in for a tensor on one device; ``elsewhere`` says that the tensor lives on another one."""

    def __init__(self, original: Tensor, device: torch.device, elsewhere: bool) -> None:
        self._original = original
        self._device = device
        self._elsewhere = elsewhere
        self._value: Tensor | None = None
        self._seen: tuple[Any, ...] = ()

    def refreshed(self) -> Tensor:
        """It, with the original's present value and flags."""
        original = self._original.detach()  # an alias: one version counter, so that a write shows in either
        seen = (original.data_ptr(), original.dtype, original.shape, original.stride(), original.device)
        alias = original.device == self._device and not self._elsewhere
        if self._value is None or seen != self._seen[1:]:
            self._value = original if alias else original.to(self._device, copy=True)
        elif not alias:
            # A write through `.data` leaves no trace, so all is copied; a graph that has saved these very values may
            # still wait for its backward, so that only a change which is known counts as a write.
            into = self._value.data if version(original) == self._seen[0] else self._value
            into.copy_(original)
        self._seen = version(original), *seen
        self._value.requires_grad_(self._original.requires_grad)
        self._value.grad = None
        return self._value


class _Twin:
    """A module that stands in for the user's, with other tensors in the place of some.

    Attributes:
        made: the module.
    """

    def __init__(
        self, module: nn.Module, children: Mapping[str, nn.Module | None], own_buffers: bool
    ) -> None:
        self.made: nn.Module = object.__new__(type(module))
        self._module = module
        self._given: dict[str, Any] = {}
        buffers = {} if own_buffers else module._buffers  # a buffer that is written is the user's
        self.made.__dict__.update(_parameters={}, _buffers=buffers, _modules=dict(children))

    def refresh(self, values: Mapping[Tensor, Tensor]) -> None:
        """Takes over the module's tensors, or those in their place, and all that is set on it."""
        self._given = {
            key: MethodType(value.__func__, self.made)
            if isinstance(value, MethodType) and value.__self__ is self._module
            else value
            for key, value in self._module.__dict__.items()
            if key not in _OWN
        }
        self.made.__dict__.update(self._given)
        self.made.__dict__["_parameters"] = _replaced(self._module._parameters, values)
        if self.made._buffers is not self._module._buffers:
            self.made._buffers.update(_replaced(self._module._buffers, values))

    def give_back(self) -> None:
        """Sets on the module what has been set on this one since."""
        for key, value in self.made.__dict__.items():
            if key not in _OWN and self._given.get(key, self) is not value:
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
