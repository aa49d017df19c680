"""Reads the tensors of a model from safetensors files, one after another, onto the devices of their stages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from ...input_error import InputError, InputTypeError
from ...tensor_file import TensorFile
from ...units import listed

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightFiles:
    """The tensors of a file, or of a folder as ``save_pretrained`` writes it, by their names.

    Args:
        weights: a file, or a folder with ``model.safetensors`` or ``model.safetensors.index.json`` and its shards.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file is not of safetensors, or cut off.
    """

    def __init__(self, weights: str | PathLike[str]) -> None:
        if not isinstance(weights, str | PathLike):
            raise InputTypeError(
                f"weights must be the path of a file or folder, got {type(weights).__name__}. For a state dict, call "
                "model.load_state_dict(state, assign=True) instead"
            )
        self._where = Path(weights)
        self._files: dict[str, TensorFile] = {}
        for path in _files(self._where):
            file = TensorFile(path)
            self._files.update((name, file) for name in file.names)

    def check(self, wanted: Mapping[Tensor, Sequence[str]]) -> None:
        """Check that the files have the tensors of a model, each under one of its names, and no others.

        Raises:
            ValueError: names the tensors that are missing, that the model does not have, or of other shapes.
        """
        missing = [names[0] for names in wanted.values() if not any(name in self._files for name in names)]
        known = {name for names in wanted.values() for name in names}
        unexpected = [name for name in self._files if name not in known]
        shapes = [
            f"{name} {self._files[name].shape(name)} in place of {tuple(tensor.shape)}"
            for tensor, names in wanted.items()
            for name in names
            if name in self._files and self._files[name].shape(name) != tuple(tensor.shape)
        ]
        faults = [
            f"{what} {listed(which)}"
            for what, which in (
                ("they lack", missing),
                ("the model does not have", unexpected),
                ("of another shape are", shapes),
            )
            if which
        ]
        if faults:
            raise InputError(
                f"the weights in {str(self._where)!r} are not those of the model: {'; '.join(faults)}. The names must "
                "be those of model.state_dict()"
            )

    def read(
        self,
        wanted: Mapping[Tensor, Sequence[str]],
        places: Mapping[Tensor, torch.device],
        deliver: Callable[[Tensor, Tensor], None],
    ) -> None:
        """Read tensors one after the other.

        Args:
            wanted: the names of each tensor of the model, as for :meth:`check`.
            places: devices, the CPU for those without.
            deliver: called with each tensor and its values on its device, in its dtype and memory layout.

        Raises:
            ValueError: a tensor of the model is saved under several names, with different values.
        """
        for tensor, names in wanted.items():
            first, *others = (name for name in names if name in self._files)
            values = self._files[first].window(first)
            for other in others:
                if not torch.equal(values, self._files[other].window(other)):
                    raise InputError(
                        f"{first!r} and {other!r} are one tensor of the model and differ in {str(self._where)!r}"
                    )
            home = places.get(tensor, torch.device("cpu"))
            content = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=home)
            deliver(tensor, content.copy_(values))


def _files(where: Path) -> Iterator[Path]:
    if where.is_file():
        yield where
    elif (where / _SINGLE).is_file():
        yield where / _SINGLE
    elif (where / _INDEX).is_file():
        index = json.loads((where / _INDEX).read_text(encoding="utf-8"))
        yield from (where / name for name in sorted(set(index["weight_map"].values())))
    else:
        raise FileNotFoundError(
            f"weights={str(where)!r} is neither a file nor a folder with {_SINGLE!r} or {_INDEX!r}"
        )
