"""Saves and loads a model's state dict, with tensors that have several names stored once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..input_error import InputError
from ..tensor_file import TensorFile
from .json_values import decode, encode
from .writing import check_tensor

_LISTED = 4
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
        extra: what modules return as their extra state, plain JSON by name.
    """

    tensors: dict[str, Tensor]
    tied: dict[str, str]
    extra: dict[str, Any]


def module_of(model: Any) -> nn.Module:
    """Return the module of a pipeline, or a module itself."""
    return model if isinstance(model, nn.Module) else model.module


def model_state(model: Model) -> ModelState:
    """Return the state of a model.

    Args:
        model: a pipeline or a module.

    Raises:
        TypeError: safetensors cannot hold a tensor, or JSON an extra state; the message names it.
    """
    first = _first_names(model)
    found = ModelState({}, {}, {})
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            found.extra[name] = encode(value, name)
        elif first.get(name, name) != name:
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
        extra: extra states, plain JSON by name.
    """

    def __init__(
        self, files: Iterable[TensorFile], tied: Mapping[str, str], extra: Mapping[str, Any]
    ) -> None:
        self._files = {name: file for file in files for name in file.names}
        self._tied = tied
        self._extra = extra

    def sources(self, model: Model) -> dict[str, str]:
        """Map each name in the model's state dict to the name under which it is saved, if it is.

        Args:
            model: a pipeline or a module.
        """
        found: dict[str, str] = {}
        for group in _tied_groups(model):
            saved = {name: source for name in group if (source := self._source(name)) is not None}
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
            ValueError: names entries that are missing, that the model does not have, or of other shapes or dtypes, and
                tensors with several names that were saved with different values.
        """
        own = model.state_dict()
        faults = {
            "it lacks": [name for name in own if name not in sources],
            "the model does not have": [name for name in (*self._files, *self._extra) if name not in used],
            "of another kind are": [
                fault
                for name, source in sources.items()
                if (fault := self._fault(name, own[name], source)) is not None
            ],
            "tied in the model and saved with different values are": self._differing(model, sources),
        }
        if any(faults.values()):
            text = "; ".join(f"{what} {listed(which)}" for what, which in faults.items() if which)
            raise InputError(f"the checkpoint is not one of this model: {text}")

    def load(self, model: Model, sources: Mapping[str, str]) -> None:
        """Copy the values into the model; ``sources`` is a result of :meth:`check`."""
        # With the versions of the modules: torch takes a state without for one of an older format, and converts it.
        state: Any = OrderedDict()
        now: Any = module_of(model).state_dict()
        state._metadata = now._metadata
        for name, source in sources.items():
            if source in self._extra:
                state[name] = decode(self._extra[source])
                continue
            window = self._files[source].window(source)
            # load_state_dict copies tensors, but hands over extra state, which the module may keep.
            state[name] = window.clone() if name.endswith(_EXTRA_STATE) else window
        model.load_state_dict(state, strict=False)  # which it would be for the whole model only

    def _source(self, name: str) -> str | None:
        source = self._tied.get(name, name)
        return source if source in self._files or source in self._extra else None

    def _fault(self, name: str, value: Any, source: str) -> str | None:
        """Return how a saved entry differs in kind from the model's."""
        if (source in self._files) != isinstance(value, Tensor):
            return f"{name} (a tensor in one of them only)"
        if source not in self._files:
            return None
        file = self._files[source]
        saved, wanted = (file.shape(source), file.dtype(source)), (tuple(value.shape), value.dtype)
        return None if saved == wanted else f"{name} {_kind(*saved)} in place of {_kind(*wanted)}"

    def _differing(self, model: Model, sources: Mapping[str, str]) -> list[str]:
        found: list[str] = []
        for group in _tied_groups(model):
            several = sorted({sources[name] for name in group if sources.get(name) in self._files})
            windows = [self._files[source].window(source) for source in several]
            if any(not _same_bytes(windows[0], other) for other in windows[1:]):
                found.append(" and ".join(several))
        return found


def listed(names: list[str]) -> str:
    """Join the first names as text, and add the count of the others."""
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def _tied_groups(model: Model) -> list[list[str]]:
    """Return the names of the entries that this process has; those of one tensor together."""
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


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _kind(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{shape} {str(dtype).removeprefix('torch.')}"
