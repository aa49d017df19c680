"""Saves and loads optimizer state by parameter names, so that parameters may be grouped in another way later.

torch numbers the parameters of an optimizer. Numbers differ between one optimizer over a model and one for each stage;
names do not. A group of parameters on disk has the class of its optimizer and its settings, such as the learning rate.

torch's ``get_optimizer_state_dict`` is not used: it steps an optimizer without state to have one, which changes the
numbers of the training.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed.model_part import StandIn
from ..dtensors import local, sharded_like
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
        values: by parameter name, its state but the tensors, plain JSON.
        tensors: by parameter name, those of its state.
    """

    groups: list[dict[str, Any]]
    values: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]

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
        return OptimizerState(
            [group for group in groups if group["parameters"]],
            {name: values for name, values in self.values.items() if name not in names},
            {name: tensors for name, tensors in self.tensors.items() if name not in names},
        )


def optimizer_state(optimizers: Sequence[Optimizer], names: Names) -> OptimizerState:
    """Return the state of optimizers.

    Raises:
        TypeError: JSON and safetensors cannot hold a value; the message names it.
        ValueError: an optimizer has a parameter that is not the model's, or that another one has.
    """
    result = OptimizerState([], {}, {})
    for optimizer in optimizers:
        packed = optimizer.state_dict()
        left = dict(packed["state"])
        groups = zip(
            optimizer.param_groups, packed["param_groups"], named_groups(optimizer, names), strict=True
        )
        for group, packed_group, named in groups:
            if twice := set(result.names).intersection(named):
                raise InputError(
                    f"two optimizers have the parameter {min(twice)!r}: each parameter needs one"
                )
            settings = {key: value for key, value in packed_group.items() if key not in _PER_PARAMETER}
            place = f"settings of optimizer group {len(result.groups)}"
            kind = {"optimizer": type(optimizer).__name__, "settings": encode(settings, place)}
            result.groups.append({**kind, "parameters": named})
            for parameter, number in zip(group["params"], packed_group["params"], strict=True):
                state = left.pop(number, None)
                if state is not None and (name := names.get(parameter)):
                    place = f"optimizer state of {name}"
                    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
                    for key, tensor in tensors.items():
                        check_tensor(f"{place}[{key!r}]", local(tensor))
                    values = {key: value for key, value in state.items() if key not in tensors}
                    result.tensors[name], result.values[name] = tensors, encode(values, place)
        if left:
            raise InputTypeError(
                f"the state of the {type(optimizer).__name__} under {next(iter(left))!r} belongs to no parameter: "
                "only state of parameters and settings of groups can be saved"
            )
    return result


class SavedOptimizers:
    """The state of optimizers in a checkpoint.

    Args:
        files: of each process that wrote the checkpoint, its JSON and its tensors, ``"{key} of {parameter}"``.
    """

    def __init__(self, files: Sequence[tuple[Mapping[str, Any], TensorFile]]) -> None:
        self._groups: dict[str, Mapping[str, Any]] = {}
        self._values: dict[str, Any] = {}
        self._tensors: dict[str, dict[str, TensorFile]] = {}
        for document, file in files:
            for group in document["groups"]:
                self._groups.update((name, group) for name in group["parameters"])
            self._values.update(document["state"])
            for stored in file.names:
                key, _, name = stored.partition(" of ")
                self._tensors.setdefault(name, {})[key] = file

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
            for named in named_groups(optimizer, names):
                for name in named:
                    self._check_parameter(type(optimizer).__name__, name, named[0])

    def _check_parameter(self, kind: str, name: str, first: str) -> None:
        """Check that the state of a parameter fits an optimizer of a class and the first parameter of its group."""
        if name not in self._groups:
            raise InputError(
                f"the checkpoint has no optimizer state of parameter {name!r}: the optimizer that was saved had "
                f"{len(self._groups)} parameters"
            )
        saved = self._groups[name]
        if saved["optimizer"] != kind:
            raise InputError(
                f"the optimizer state of {name!r} is that of a {saved['optimizer']}, and the optimizer is a {kind}"
            )
        if saved["settings"] != self._groups[first]["settings"]:
            raise InputError(
                f"parameters {first!r} and {name!r} are in one group and had different settings when they were saved: "
                "make the groups of the optimizer as they were"
            )

    def load(self, optimizer: Optimizer, names: Names) -> None:
        """Set state and settings of an optimizer, after :meth:`check`."""
        packed = optimizer.state_dict()
        before, packed["state"] = packed["state"], {}
        loaded: dict[nn.Parameter, dict[str, Any]] = {}
        groups = zip(
            optimizer.param_groups, packed["param_groups"], named_groups(optimizer, names), strict=True
        )
        for group, packed_group, named in groups:
            if named:
                packed_group.update(decode(self._groups[named[0]]["settings"]))
            for parameter, number in zip(group["params"], packed_group["params"], strict=True):
                if isinstance(parameter, StandIn) and number in before:
                    packed["state"][number] = before[number]
                elif (name := names.get(parameter)) in self._values:
                    loaded[parameter] = packed["state"][number] = {
                        key: sharded_like(value, parameter)
                        if getattr(value, "shape", 0) == parameter.shape
                        else value
                        for key, value in self._state(name).items()
                    }
        optimizer.load_state_dict(packed)
        # torch casts state to the dtype of the parameter; what was float32 beside bfloat16 stays so here.
        for parameter, state in loaded.items():
            for key, value in state.items():
                now = optimizer.state[parameter].get(key)
                if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                    optimizer.state[parameter][key] = value.to(now.device)

    def _state(self, name: str) -> dict[str, Any]:
        files = self._tensors.get(name, {})
        tensors = {key: file.window(stored_name(key, name)).clone() for key, file in files.items()}
        return {**decode(self._values[name]), **tensors}


def stored_name(key: str, parameter: str) -> str:
    """Return the name in a file of a tensor in a parameter's state."""
    return f"{key} of {parameter}"


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
