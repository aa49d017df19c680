"""Saves and loads optimizer state by parameter names, so that parameters may be grouped in another way later.

torch numbers the parameters of an optimizer. Numbers differ between one optimizer over a model and one for each stage;
names do not. A group of parameters on disk has the class of its optimizer and its settings, such as the learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed.model_part import StandIn
from ..input_error import InputError, InputTypeError
from ..tensor_file import TensorFile
from .json_values import decode, encode
from .writing import check_tensor

Names = Mapping[nn.Parameter, str]
_PER_PARAMETER = ("params", "param_names")


class OptimizerState(NamedTuple):
    """The state of optimizers in the form that is written.

    Attributes:
        groups: each with ``optimizer``, ``settings`` and ``parameters``, plain JSON.
        state: plain JSON by parameter name; tensors are named in it.
        tensors: by the names that ``groups`` and ``state`` have for them.
    """

    groups: list[dict[str, Any]]
    state: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def names(self) -> list[str]:
        """The names of the parameters."""
        return [name for group in self.groups for name in group["parameters"]]

    def without(self, names: Collection[str]) -> OptimizerState:
        """Return the state without some parameters."""
        groups = [
            {**group, "parameters": [name for name in group["parameters"] if name not in names]}
            for group in self.groups
        ]
        groups = [group for group in groups if group["parameters"]]
        state = {name: one for name, one in self.state.items() if name not in names}
        used: set[str] = set()
        decode([groups, state], used.add)
        return OptimizerState(
            groups, state, {name: one for name, one in self.tensors.items() if name in used}
        )


def optimizer_state(optimizers: Sequence[Optimizer], names: Names) -> OptimizerState:
    """Return the state of optimizers.

    Args:
        optimizers: with parameters of their own each.
        names: of the parameters of the model.

    Raises:
        TypeError: JSON and safetensors cannot hold a value; the message names it.
        ValueError: an optimizer has a parameter that is not the model's, or that another one has.
    """
    found = OptimizerState([], {}, {})
    known: set[str] = set()

    def store(place: str, tensor: Tensor) -> str:
        check_tensor(place, tensor)
        found.tensors[place] = tensor
        return place

    for optimizer in optimizers:
        packed = optimizer.state_dict()
        left = dict(packed["state"])
        groups = zip(
            optimizer.param_groups, packed["param_groups"], named_groups(optimizer, names), strict=True
        )
        for one, group, own in groups:
            if twice := known.intersection(own):
                raise InputError(
                    f"two optimizers have the parameter {min(twice)!r}: each parameter needs one"
                )
            known.update(own)
            settings = {key: value for key, value in group.items() if key not in _PER_PARAMETER}
            place = f"settings of optimizer group {len(found.groups)}"
            found.groups.append(
                {
                    "optimizer": type(optimizer).__name__,
                    "settings": encode(settings, place, store),
                    "parameters": own,
                }
            )
            for parameter, number in zip(one["params"], group["params"], strict=True):
                state = left.pop(number, None)
                if state is not None and (name := names.get(parameter)):
                    found.state[name] = encode(state, f"optimizer state of {name}", store)
        if left:
            raise InputTypeError(
                f"the state of the {type(optimizer).__name__} under {next(iter(left))!r} belongs to no parameter: "
                "only state of parameters and settings of groups can be saved"
            )
    return found


class SavedOptimizers:
    """The state of optimizers in a checkpoint.

    Args:
        files: of each process that wrote the checkpoint, its JSON and its tensors.
    """

    def __init__(self, files: Sequence[tuple[Mapping[str, Any], TensorFile]]) -> None:
        self._groups: dict[str, tuple[Mapping[str, Any], TensorFile]] = {}
        self._state: dict[str, tuple[Any, TensorFile]] = {}
        for document, tensors in files:
            for group in document["groups"]:
                self._groups.update((name, (group, tensors)) for name in group["parameters"])
            self._state.update((name, (state, tensors)) for name, state in document["state"].items())

    @property
    def names(self) -> list[str]:
        """The names of the parameters with saved optimizer state."""
        return list(self._groups)

    def check(self, optimizers: Sequence[Optimizer], names: Names) -> None:
        """Check that the state fits the optimizers. Nothing is changed.

        Raises:
            ValueError: a parameter is missing in the checkpoint, was in an optimizer of another class, or had other
                settings than the rest of its group.
        """
        for optimizer in optimizers:
            for own in named_groups(optimizer, names):
                if missing := [name for name in own if name not in self._groups]:
                    raise InputError(
                        f"the checkpoint has no optimizer state of parameter {missing[0]!r}: the optimizer that was "
                        f"saved had {len(self._groups)} parameters"
                    )
                kinds = {self._groups[name][0]["optimizer"] for name in own} - {type(optimizer).__name__}
                if kinds:
                    raise InputError(
                        f"the optimizer state of {own[0]!r} is that of a {min(kinds)}, and the optimizer is a "
                        f"{type(optimizer).__name__}"
                    )
                if other := next((name for name in own if self._differ(own[0], name)), None):
                    raise InputError(
                        f"parameters {own[0]!r} and {other!r} are in one group and had different settings when they "
                        "were saved: make the groups of the optimizer as they were"
                    )

    def load(self, optimizer: Optimizer, names: Names) -> None:
        """Set state and settings of an optimizer, after :meth:`check`."""
        packed = optimizer.state_dict()
        before, packed["state"] = packed["state"], {}
        exact: list[tuple[nn.Parameter, dict[str, Any]]] = []
        groups = zip(
            optimizer.param_groups, packed["param_groups"], named_groups(optimizer, names), strict=True
        )
        for group, packed_group, own in groups:
            if own:
                saved, tensors = self._groups[own[0]]
                packed_group.update(decode(saved["settings"], _copies(tensors)))
            for parameter, number in zip(group["params"], packed_group["params"], strict=True):
                if isinstance(parameter, StandIn) and number in before:
                    packed["state"][number] = before[number]
                elif (name := names.get(parameter)) in self._state:
                    state, tensors = self._state[name]
                    packed["state"][number] = decode(state, _copies(tensors))
                    exact.append((parameter, packed["state"][number]))
        optimizer.load_state_dict(packed)
        # torch casts state to the dtype of the parameter; what was float32 beside bfloat16 stays so here.
        for parameter, state in exact:
            for key, value in state.items():
                loaded = optimizer.state[parameter].get(key)
                if isinstance(value, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                    optimizer.state[parameter][key] = value.to(loaded.device)

    def _differ(self, one: str, other: str) -> bool:
        """Return whether the settings of two parameters differ."""
        if self._groups[one][0] is self._groups[other][0]:
            return False
        settings = [
            decode(group["settings"], lambda stored, tensors=tensors: tensors.window(stored).tolist())
            for group, tensors in (self._groups[one], self._groups[other])
        ]
        return settings[0] != settings[1]


def named_groups(optimizer: Optimizer, names: Names) -> list[list[str]]:
    """Return the names of the parameters of each group; none for the stand-in of a rank that trains none.

    Raises:
        ValueError: a parameter is not the model's.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names and not isinstance(parameter, StandIn):
                raise InputError(
                    f"the {type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that is not the "
                    "model's: make it of pipe.parameters(), after the pipeline"
                )
    return [
        [names[parameter] for parameter in group["params"] if parameter in names]
        for group in optimizer.param_groups
    ]


def _copies(tensors: TensorFile) -> Callable[[str], Tensor]:
    return lambda name: tensors.window(name).clone()
