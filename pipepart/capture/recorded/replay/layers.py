"""Layers that replay a recording: each calls its modules and the functions between them on live values."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..placing import at
from ..refusal import CaptureError
from .given import DeviceRule, Env
from .recording import Group, Part, Recording, own_loss


class Live:
    """The live values between two layers of a recorded model, with their recording.

    None stands for a value that goes another way, past the stage that these layers are in.
    """

    __slots__ = ("recording", "tensors")

    def __init__(self, recording: Recording, tensors: Sequence[Tensor | None]) -> None:
        self.recording = recording
        self.tensors = tensors


class Unfinished(Live):
    """The live values after the last layer of a model that computes its own loss."""

    __slots__ = ()


def _flatten(live: Live) -> tuple[list[Any], Recording]:
    return list(live.tensors), live.recording


def _flatten_with_keys(live: Live) -> tuple[list[tuple[Any, Any]], Recording]:
    return [(pytree.SequenceKey(i), tensor) for i, tensor in enumerate(live.tensors)], live.recording


for _kind in (Live, Unfinished):
    pytree.register_pytree_node(
        _kind,
        _flatten,
        lambda tensors, recording, kind=_kind: kind(recording, tuple(tensors)),
        flatten_with_keys_fn=_flatten_with_keys,
    )


class BoundCall(NamedTuple):
    """The arguments of one call, matched to a recording.

    Attributes:
        live: the input of the first layer.
        rest: the arguments that only the model's own loss needs.
    """

    live: Live
    rest: tuple[Tensor, ...]

    @classmethod
    def of(cls, recording: Recording, arguments: Iterable[Tensor]) -> BoundCall:
        """Match the tensors among the arguments, in the order of their nest."""
        values = dict(zip(recording.inputs, arguments, strict=True))
        live = Live(recording, tuple([values[number] for number in recording.parts[0].takes]))
        return cls(live, tuple(values[number] for number in recording.end_inputs))


def used_by(value: Any, layer: int) -> Any:
    """Return the input of a layer, by its index in the chain, without live values that it does not use."""
    if not isinstance(value, Live):
        return value
    recording = value.recording
    pairs = zip(recording.parts[layer].takes, value.tensors, strict=True)
    return [tensor for number, tensor in pairs if layer in recording.touched[number]]


class RecordedLayer(nn.Module):
    """One layer of a recorded model. Its modules are the user's, under the names that they have in the model.

    Args:
        index: position in the chain.
        group: the modules that it calls, and the parameters and buffers that it uses beside them.
        model: the user's.
    """

    def __init__(self, index: int, group: Group, model: nn.Module) -> None:
        super().__init__()
        self.index = index
        self.paths = tuple(dict.fromkeys(group.modules))
        for path in self.paths:
            self._modules[path] = model.get_submodule(path)
        owners: dict[str, list[str]] = {}
        for path in group.tensors:
            owner, _, name = path.rpartition(".")
            owners.setdefault(owner, []).append(name)
        for owner, names in owners.items():
            self._modules[_KEY + owner] = OwnTensors(model.get_submodule(owner), names)

    def forward(self, live: Live) -> Any:
        """Replay the layer's part of the recording."""
        recording = live.recording
        part = recording.parts[self.index]
        rule = _device_rule((*self.parameters(), *live.tensors), recording) if part.placed else None
        env = _replayed(
            recording, part, dict(zip(part.takes, live.tensors, strict=True)), self._modules, rule
        )
        if self.index < len(recording.parts) - 1:
            return Live(recording, tuple([env[number] for number in part.gives]))
        if recording.loss is None:
            return recording.completed(env)
        return Unfinished(recording, tuple([env[number] for number in recording.end.takes]))

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Generator[tuple[str, nn.Module], None, None]:
        """Yield the modules with their names in the user's model."""
        memo = set() if memo is None else memo
        if remove_duplicate and self in memo:
            return
        memo.add(self)
        yield prefix, self
        for key, module in self._modules.items():
            assert module is not None
            yield from module.named_modules(memo, key.removeprefix(_KEY), remove_duplicate)

    def __repr__(self) -> str:
        return repr(self._modules[self.paths[-1]]) if self.paths else type(self).__name__


def _replayed(
    recording: Recording,
    part: Part,
    env: Env,
    modules: Mapping[str, Any],
    rule: DeviceRule | None,
) -> Env:
    """Run the calls of one part again, and return the tensors by number.

    Args:
        recording: that the part belongs to.
        part: of a layer, or the end.
        env: the live values before it, and the arguments that only the end needs, by number.
        modules: those of the layer; none for the end.
        rule: puts recorded devices, and the model's other tensors, where the part is replayed; None to leave them.
    """
    here = next((value.device for value in env.values() if value is not None and value.dim()), None)
    for number, path, name in part.state:
        # A parameter may be another stage's, on its device. In a step the layer has a copy of it; where a replay is
        # compared with the model, it has the parameter itself.
        env[number] = at(here, held(modules[_KEY + path], name))
    for number in part.constants:
        env[number] = recording.constants[number] if rule is None else rule(recording.constants[number])
    for call in part.calls:
        func = modules[call.module] if call.module else call.func
        call.run(env, func, recording.autocast, rule if call.given.has_device else None)
    return env


def reads_values(layer: nn.Module, value: Any) -> bool:
    """Return True if a layer reads values of tensors outside of its modules, which compiled code cannot do."""
    if not (isinstance(layer, RecordedLayer) and isinstance(value, Live)):
        return False
    return any(call.reads for call in value.recording.parts[layer.index].calls)


def held(owner: Any, name: str) -> Tensor:
    """Return the parameter or buffer of a module with this name."""
    tensor = owner._parameters.get(name)
    return owner._buffers[name] if tensor is None else tensor


def _device_rule(tensors: Iterable[Tensor | None], recording: Recording) -> DeviceRule:
    """Return what puts the device of the first tensor in place of those where the model was recorded."""
    here = next((tensor.device for tensor in tensors if tensor is not None), torch.device("cpu"))

    def rule(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return here if leaf in recording.devices else leaf
        if isinstance(leaf, Tensor) and leaf.is_meta and here.type != "meta":
            raise CaptureError(
                f"the model uses a tensor {list(leaf.shape)} that is an attribute of a module in a stage of another "
                "process: register it as a buffer of that module, or hold it in the model itself"
            )
        return leaf.to(here) if isinstance(leaf, Tensor) and leaf.dim() else leaf

    return rule


_KEY = "/"  # before the path of a module whose own tensors a layer uses


def recorded_layer(index: int, group: Group, model: nn.Module) -> RecordedLayer:
    """Return a layer whose class has the name of the user's module, for tables and messages."""
    last = model.get_submodule(group.modules[-1]) if group.modules else model
    return type(type(last).__name__, (RecordedLayer,), {})(index, group, model)


class OwnTensors(nn.Module):
    """A view of some parameters and buffers of a user's module, without its children."""

    def __init__(self, owner: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.__dict__["_parameters"] = _Window(owner._parameters, names)
        self.__dict__["_buffers"] = _Window(owner._buffers, names)
        self.__dict__["_non_persistent_buffers_set"] = owner._non_persistent_buffers_set


class _Window(MutableMapping[str, Any]):
    """Some entries of a dict, read and written there."""

    def __init__(self, entries: dict[str, Any], names: Sequence[str]) -> None:
        self._entries, self._names = entries, tuple(names)

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._entries[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._entries[name] = value

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in self._entries)

    def __len__(self) -> int:
        return sum(name in self._entries for name in self._names)


def finish(unfinished: Live, arguments: Sequence[Tensor], loss: Any = None) -> Any:
    """Return the output of a model that computes its own loss, from its live values and its arguments.

    Args:
        unfinished: what the last layer returned.
        arguments: those that only the loss needs.
        loss: what takes the place of the loss in the output; None for the loss itself.
    """
    return unfinished.recording.completed(_ended(unfinished, arguments), loss)


def loss_of(unfinished: Any, arguments: Sequence[Tensor] = (), samples: int | None = None) -> Any:
    """Return the loss that a model computes, from the output of its last layer. Used as the loss function of a step.

    Args:
        unfinished, arguments: as for :func:`finish`.
        samples: of the mini-batch, which these tensors are in place of those of a micro-batch; None for the latter.

    Raises:
        CaptureError: the model would compute another loss for as many samples.
    """
    if not isinstance(unfinished, Unfinished):  # a model that is one layer
        loss = own_loss(unfinished)
        return unfinished if loss is None else loss
    recording = unfinished.recording
    assert recording.loss is not None
    return _ended(unfinished, arguments, samples)[recording.loss]


def _ended(unfinished: Live, arguments: Sequence[Tensor], samples: int | None = None) -> Env:
    recording = unfinished.recording
    end = recording.end if samples is None else recording.ends.get(samples)
    if end is None:
        raise CaptureError(f"the loss calls other functions for {samples} samples")
    rule = _device_rule(unfinished.tensors, recording) if recording.end.placed else None
    takes, values = (*end.takes, *recording.end_inputs), (*unfinished.tensors, *arguments)
    return _replayed(recording, end, dict(zip(takes, values, strict=True)), {}, rule)
