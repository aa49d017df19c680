"""Saves and loads a model's state dict, with tensors that have several names stored once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..input_error import InputError, InputTypeError
from ..tensor_file import TensorFile
from .writing import check_tensor

_LISTED = 4


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
    """Return the state of a model.

    Args:
        model: a pipeline or a module.

    Raises:
        TypeError: safetensors cannot hold a value; the message names it.
    """
    first = _first_names(model)
    found = ModelState({}, {})
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise InputTypeError(
                f"{name} is a {type(value).__name__} in the state dict, which safetensors cannot hold: let "
                "get_extra_state return a tensor, or pass save the value as data="
            )
        if first.get(name, name) != name:
            found.tied[name] = first[name]
        else:
            check_tensor(name, value)
            found.tensors[name] = value
    return found


class SavedModel:
    """The tensors of a model in a checkpoint.

    Args:
        files: with the tensors.
        tied: the other names of tensors, each with the name in the files.
    """

    def __init__(self, files: Iterable[TensorFile], tied: Mapping[str, str]) -> None:
        self._files = {name: file for file in files for name in file.names}
        self._tied = tied

    def sources(self, model: Model) -> dict[str, str]:
        """Map each name in the model's state dict to the name under which it is saved, if it is.

        Args:
            model: a pipeline or a module.
        """
        found: dict[str, str] = {}
        for group in _tied_groups(model):
            saved = {name: self._tied.get(name, name) for name in group}
            saved = {name: source for name, source in saved.items() if source in self._files}
            if saved:
                found.update((name, saved.get(name, next(iter(saved.values())))) for name in group)
        return found

    def check(self, model: Model, sources: Mapping[str, str], used: Collection[str]) -> None:
        """Check that the checkpoint fits the model. Nothing is changed.

        Args:
            model: a pipeline or a module.
            sources: a result of :meth:`sources`.
            used: the saved names that any rank uses.

        Raises:
            ValueError: names tensors that are missing, that the model does not have, or of other shapes or dtypes, and
                those that are one tensor in the model and were saved as several.
        """
        own = model.state_dict()
        apart = [{sources[name]: None for name in group if name in sources} for group in _tied_groups(model)]
        faults = {
            "it lacks": [name for name in own if name not in sources],
            "the model does not have": [name for name in self._files if name not in used],
            "of another kind are": [
                fault
                for name, source in sources.items()
                if (fault := self._fault(name, own[name], source)) is not None
            ],
            "tied in the model and saved apart are": [
                " and ".join(names) for names in apart if len(names) > 1
            ],
        }
        if any(faults.values()):
            text = "; ".join(f"{what} {listed(which)}" for what, which in faults.items() if which)
            raise InputError(f"the checkpoint is not one of this model: {text}")

    def load(self, model: Model, sources: Mapping[str, str]) -> None:
        """Copy the values into the model; ``sources`` is a result of :meth:`sources`."""
        # With the versions of the modules: torch takes a state without for one of an older format, and converts it.
        state: Any = OrderedDict()
        now: Any = module_of(model).state_dict()
        state._metadata = now._metadata
        for name, source in sources.items():
            state[name] = self._files[source].window(source)
        model.load_state_dict(state, strict=False)  # which it would be for the whole model only

    def _fault(self, name: str, value: Any, source: str) -> str | None:
        """Return how a saved tensor differs in kind from the model's."""
        file = self._files[source]
        saved, wanted = (file.shape(source), file.dtype(source)), (tuple(value.shape), value.dtype)
        return None if saved == wanted else f"{name} {_kind(*saved)} in place of {_kind(*wanted)}"


def listed(names: list[str]) -> str:
    """Join the first names as text, and add the count of the others."""
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def _tied_groups(model: Model) -> list[list[str]]:
    """Return the names of the tensors that this process has; those of one tensor together."""
    first = _first_names(model)
    groups: dict[str, list[str]] = {}
    for name in model.state_dict():
        groups.setdefault(first.get(name, name), []).append(name)
    return list(groups.values())


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
