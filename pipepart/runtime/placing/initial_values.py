"""The initial values of a model on the meta device: from its construction, or from files of weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from ...capture import deferred, holds_meta
from .places import Places
from .swapping import rebind, swap_values, without_weak_references
from .weights import WeightFiles

Weights = str | PathLike[str]


class _Held(NamedTuple):
    """A tensor of the model, under one of its names.

    Attributes:
        kind: ``"parameter"``, ``"buffer"`` or ``"attribute"``.
        in_state: whether the state dict of the model has it.
    """

    kind: str
    name: str
    tensor: Tensor
    in_state: bool


class InitialValues:
    """The values of the tensors that a model does not have yet.

    Args:
        model: the user's.
        held: its tensors.
        files: with those of its state dict; None if all come from the model's construction.
    """

    def __init__(self, model: nn.Module, held: Sequence[_Held], files: WeightFiles | None) -> None:
        self._model = model
        self._files = files
        self._read: dict[Tensor, list[str]] = {}
        self._computed: dict[Tensor, str] = {}
        for one in held:
            if files is not None and one.in_state:
                self._read.setdefault(one.tensor, []).append(one.name)
        for one in held:
            if one.tensor.is_meta and one.tensor not in self._read:
                self._computed.setdefault(one.tensor, f"{one.kind} {one.name!r}")

    @classmethod
    def of(cls, model: nn.Module, weights: Weights | None) -> Self | None:
        """Return the values of a model; None if it has its parameters and buffers, and ``weights`` is None.

        Args:
            weights: a file or a folder of safetensors.

        Raises:
            CaptureError: the values of a tensor are not known.
            ValueError: the files have other tensors than the model.
            FileNotFoundError, ImportError: there are no such files, or safetensors is not installed.
        """
        if weights is None and not holds_meta(model):
            return None
        found = cls(model, list(_held(model)), None if weights is None else WeightFiles(weights))
        unread = ((what, tensor) for tensor, what in found._computed.items())
        deferred.refuse_unknown(unread, weights is not None)
        if found._files is not None:
            found._files.check(found._read)
        return found

    def fill(self, places: Places) -> None:
        """Compute or read each tensor, and put it on its device.

        What no stage uses goes to the CPU. What only other processes use gets no values. The host holds about one
        tensor at a time, beside those that stay there.
        """
        replaced: dict[Tensor, Tensor] = {}

        def put(tensor: Tensor, values: Tensor) -> None:
            if not tensor.is_meta:
                with torch.no_grad():
                    tensor.copy_(values)
                return
            home = places.homes.get(tensor, torch.device("cpu"))
            deferred.unseal(tensor)
            now = swap_values(tensor, values.to(home))
            if now is not tensor:
                replaced[tensor] = now

        computed = [tensor for tensor in self._computed if tensor not in places.foreign]
        for tensor in computed:
            if tensor.grad_fn is not None and not tensor._is_view():
                tensor.detach_()  # as the weight of nn.utils.weight_norm, whose graph would hold its parameters
        with without_weak_references(self._model.modules()):
            deferred.values_of(computed, put)
            if self._files is not None:
                read = {tensor: names for tensor, names in self._read.items() if tensor not in places.foreign}
                self._files.read(read, places.homes, put)
            for name in rebind(self._model.named_modules(), replaced):
                warnings.warn(
                    f"{name} is another tensor since it has values, as a graph or a weak reference holds the one "
                    "without: if it is a parameter, make the optimizer now, as one that was made before has the wrong "
                    "tensor",
                    stacklevel=4,
                )


def _held(model: nn.Module) -> Iterator[_Held]:
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        hidden = module._non_persistent_buffers_set
        for key, tensor in module._parameters.items():
            if tensor is not None:
                yield _Held("parameter", prefix + key, tensor, True)
        for key, tensor in module._buffers.items():
            if tensor is not None:
                yield _Held("buffer", prefix + key, tensor, key not in hidden)
        for key, tensor in deferred.attributes_of(module):
            yield _Held("attribute", prefix + key, tensor, False)
