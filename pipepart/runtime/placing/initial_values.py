"""The initial values of a model on the meta device: from its modules' initializers, or from files of weights."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from ...capture import CaptureError, holds_meta
from ...input_error import InputTypeError
from .initialization import Initialize, initialize_modules
from .moving import Places, swap_values, without_weak_references
from .weights import WeightFiles

Weights = str | PathLike[str]


class _Held(NamedTuple):
    """A tensor of the model, under one of its names.

    Attributes:
        what: with its kind, as ``"parameter 'head.weight'"``.
        in_state: whether the state dict of the model has it.
    """

    what: str
    name: str
    tensor: Tensor
    in_state: bool


class InitialValues:
    """The values of the tensors that a model does not have yet.

    Args:
        files: with the tensors of its state dict; None if all are initialized.
        initialize: see :class:`pipepart.Pipeline`.
    """

    def __init__(self, model: nn.Module, files: WeightFiles | None, initialize: Initialize | None) -> None:
        self._model = model
        self._files = files
        self._initialize = initialize
        self._read: dict[Tensor, list[str]] = {}
        self._initialized: dict[Tensor, str] = {}
        held = list(_held(model))
        for entry in held:
            if files is not None and entry.in_state:
                self._read.setdefault(entry.tensor, []).append(entry.name)
        for entry in held:
            if entry.tensor.is_meta and entry.tensor not in self._read:
                self._initialized.setdefault(entry.tensor, entry.what)

    @classmethod
    def of(
        cls, model: nn.Module, weights: Weights | None, initialize: Initialize | None = None
    ) -> Self | None:
        """Return the values of a model; None if it has its parameters and buffers, and ``weights`` is None.

        Raises:
            CaptureError: nothing initializes a tensor.
            TypeError: ``initialize`` is no function.
            ValueError: the files have other tensors than the model.
            FileNotFoundError: there are no such files.
        """
        if initialize is not None and not callable(initialize):
            raise InputTypeError(f"initialize must be a function of a module, got {initialize!r}")
        if weights is None and not holds_meta(model):
            return None
        values = cls(model, None if weights is None else WeightFiles(weights), initialize)
        values._check_initialized(weights is not None)
        if values._files is not None:
            values._files.check(values._read)
        return values

    def fill(self, places: Places) -> None:
        """Initialize each tensor on the CPU, or read it to its device. What only other processes use gets no values."""
        here = {tensor: what for tensor, what in self._initialized.items() if tensor not in places.foreign}
        with without_weak_references(self._model.modules()):
            if here and self._initialize is not None:
                initialize_modules(self._model, here, self._initialize)
            if self._files is not None:
                read = {tensor: names for tensor, names in self._read.items() if tensor not in places.foreign}
                self._files.read(read, places.homes, _put)

    def _check_initialized(self, weights: bool) -> None:
        """Refuse tensors for which nothing says how they are initialized."""
        unsaved = " and the weights do not have it" if weights else ""
        for tensor, what in self._initialized.items():
            if is_lazy(tensor):
                raise CaptureError(
                    f"{what} is of a lazy layer without shapes: call the model once on a sample first"
                )
            if what.startswith("attribute"):
                raise CaptureError(f"{what} is on the meta device{unsaved}: register it as a buffer")
            if self._initialize is None:
                others = "" if weights else ", weights='folder or file.safetensors'"
                raise CaptureError(
                    f"{what} is on the meta device{unsaved}, and what the constructor wrote into it is lost. Pass "
                    "initialize=, a function that initializes the tensors of one module as in "
                    "model.apply(initialize), such as model._init_weights of a model of transformers, or lambda "
                    f"module: getattr(module, 'reset_parameters', int)(){others}; or give the model real tensors: "
                    "model.to_empty(device='cpu'), then model.load_state_dict(state)"
                )
        valued = (name for name, parameter in self._model.named_parameters() if not parameter.is_meta)
        name = next(valued, None)
        missing = next((what for what in self._initialized.values() if what.startswith("parameter")), None)
        if name is not None and missing is not None:
            raise CaptureError(
                f"parameter {name!r} has values and {missing} has none: an initialization would overwrite the first. "
                "Construct all of the model under deferred_init, or give all of it values"
            )


def _put(tensor: Tensor, values: Tensor) -> None:
    if not tensor.is_meta:
        with torch.no_grad():
            tensor.copy_(values)
    elif swap_values(tensor, values) is not tensor:
        raise CaptureError(
            f"a parameter of shape {list(tensor.shape)} cannot get its weights, as a graph or a weak reference holds "
            "it: make the pipeline before a forward of the model"
        )


def _held(model: nn.Module) -> Iterator[_Held]:
    """Yield the tensors of a model: attributes last, as they may be parameters of other modules."""
    modules = [
        (f"{path}." if path else "", module) for path, module in model.named_modules(remove_duplicate=False)
    ]
    for prefix, module in modules:
        hidden = module._non_persistent_buffers_set
        for key, tensor in module._parameters.items():
            if tensor is not None:
                yield _Held(f"parameter {prefix + key!r}", prefix + key, tensor, True)
        for key, tensor in module._buffers.items():
            if tensor is not None:
                yield _Held(f"buffer {prefix + key!r}", prefix + key, tensor, key not in hidden)
    for prefix, module in modules:
        for key, tensor in _meta_attributes(module):
            yield _Held(f"attribute {prefix + key!r}", prefix + key, tensor, False)


def _meta_attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors on the meta device among the attributes of a module, also in lists, tuples and dicts."""
    for name, value in vars(module).items():
        if name not in ("_parameters", "_buffers", "_modules"):
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, Tensor) and leaf.is_meta:
                    yield name, leaf
