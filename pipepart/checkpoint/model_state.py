"""Saves and loads a model's state dict, with tensors that have several names stored once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..dtensors import local
from ..input_error import InputError, InputTypeError
from ..tensor_file import TensorFile
from ..units import listed
from .writing import check_tensor

_EXTRA_STATE = "_extra_state"  # what torch calls it in a state dict


class Model(Protocol):
    """A model to save or load: a pipeline or a module."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any], /, *, strict: bool) -> Any: ...
    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]: ...


class ModelState(NamedTuple):
    """The state of a model in the form that is written.

    Attributes:
        tensors: by name. A tensor with several names has the first, as in what ``transformers`` writes.
        tied: the other names, each with the first.
    """

    tensors: dict[str, Tensor]
    tied: dict[str, str]


def module_of(model: Any) -> nn.Module:
    """Return the module of a pipeline, or a module itself."""
    return model if isinstance(model, nn.Module) else model.module


def model_state(model: Model) -> ModelState:
    """Return the state of a model; refuse values that safetensors cannot hold."""
    first = _first_names(model)
    state = ModelState({}, {})
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise InputTypeError(
                f"{name} is a {type(value).__name__} in the state dict, which safetensors cannot hold: let "
                "get_extra_state return a tensor, or pass save the value as data="
            )
        if first.get(name, name) != name:
            state.tied[name] = first[name]
        else:
            check_tensor(name, value if isinstance(model, nn.Module) else local(value))
            state.tensors[name] = value
    return state


class SavedModel:
    """The tensors of a model in a checkpoint; ``tied`` are further names, each with the name in the files."""

    def __init__(self, files: Iterable[TensorFile], tied: Mapping[str, str]) -> None:
        self._files = {name: file for file in files for name in file.names}
        self._tied = tied

    def check(self, model: Model) -> None:
        """Check that the checkpoint fits the whole model. Nothing is changed.

        Raises:
            ValueError: names tensors that are missing, that the model does not have, or of other shapes or dtypes, and
                those that are one tensor in the model and were saved as several.
        """
        sources = self._sources(model)
        used: dict[str, dict[str, None]] = {}  # by first name in the model, the names in the files
        for name, first in _first_names(model).items():
            used.setdefault(first, {}).update({sources[name]: None} if name in sources else {})
        faults = {
            "it lacks": [name for name, saved in used.items() if not saved],
            "the model does not have": [name for name in self._files if name not in sources.values()],
            "of another kind are": [
                fault
                for name, value in model.state_dict().items()
                if name in sources and (fault := self._fault(name, value, sources[name]))
            ],
            "tied in the model and saved apart are": [
                " and ".join(saved) for saved in used.values() if len(saved) > 1
            ],
        }
        if any(faults.values()):
            text = "; ".join(f"{what} {listed(which)}" for what, which in faults.items() if which)
            raise InputError(f"the checkpoint is not one of this model: {text}")

    def load(self, model: Model) -> None:
        """Copy the values into the model, after :meth:`check`."""
        # With the versions of the modules: torch takes a state without for one of an older format, and converts it.
        state: Any = OrderedDict()
        now: Any = module_of(model).state_dict()
        state._metadata = now._metadata
        current = model.state_dict()
        for name, source in self._sources(model).items():
            if name in current:
                window = self._files[source].window(source)
                # load_state_dict copies tensors, but hands over extra state, which the module may keep.
                state[name] = window.clone() if name.endswith(_EXTRA_STATE) else window
        model.load_state_dict(state, strict=False)  # which it would be for the whole model only

    def _sources(self, model: Model) -> dict[str, str]:
        """Map each name in the whole model's state dict to the name under which the tensor is saved, if it is."""
        first = _first_names(model)
        saved = {name: source for name in first if (source := self._tied.get(name, name)) in self._files}
        by_tensor = {first[name]: source for name, source in reversed(saved.items())}
        return {name: saved.get(name, by_tensor[first[name]]) for name in first if first[name] in by_tensor}

    def _fault(self, name: str, value: Any, source: str) -> str | None:
        """Return how a saved tensor differs in kind from the model's."""
        file = self._files[source]
        saved, wanted = (file.shape(source), file.dtype(source)), (tuple(value.shape), value.dtype)
        return None if saved == wanted else f"{name} {_kind(*saved)} in place of {_kind(*wanted)}"


def _first_names(model: Model) -> dict[str, str]:
    """Return for each name of a tensor in the whole model's state dict the first name of the same tensor."""
    first: dict[Tensor, str] = {}
    return {
        name: first.setdefault(value, name)
        for name, value in module_of(model).state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
    }


def _kind(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{shape} {str(dtype).removeprefix('torch.')}"
