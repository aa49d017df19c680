"""Numbers the tensors of a recording: arguments, parameters, buffers, constants and results of calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.weak import WeakIdKeyDictionary

from ....autograd.in_place import version
from ..refusal import LeftAsideError, SkeletonError, line_of_user


class TensorNumbers:
    """The numbers of the tensors of one recording.

    Args:
        paths: path of each parameter and buffer, by its id.
        held: where the other attributes of the model's modules are kept, by the ids of these and of tensors in them.

    Attributes:
        state: path of each parameter and buffer that was used, by its number.
        constants: other tensors of the model that were used, by their numbers.
        inputs: the arguments of the model, by their numbers.
        varying: numbers of the tensors that depend on an input, a module, the model's state or a draw.
        made_in: which whole module makes a tensor, where that is noted.
        count: of the numbers so far.
    """

    def __init__(self, paths: Mapping[int, str], held: Mapping[int, str]) -> None:
        self.state: dict[int, str] = {}
        self.constants: dict[int, Tensor] = {}
        self.inputs: dict[int, Tensor] = {}
        self.varying: set[int] = set()
        self.made_in: Any = WeakIdKeyDictionary()
        self.count = 0
        self._paths, self._held = paths, held
        self._numbers: Any = WeakIdKeyDictionary()
        self._of_custom: Any = (
            WeakIdKeyDictionary()
        )  # whether a custom function had made it when it got its number
        self._versions: dict[int, tuple[Tensor, int]] = {}  # of the state, before the forward

    def known(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor; None if it has none yet."""
        return self._numbers.get(tensor)

    def new(self, tensor: Tensor) -> int:
        """Assign the next number to a tensor."""
        number, self.count = self.count, self.count + 1
        self.note(tensor, number)
        return number

    def note(self, tensor: Tensor, number: int) -> None:
        """Assign a number to a tensor that a call has returned."""
        self._numbers[tensor] = number
        self._of_custom[tensor] = isinstance(tensor.grad_fn, BackwardCFunction)

    def alias(self, tensor: Tensor, number: int) -> None:
        """Assign an existing number to a tensor that has none."""
        if self.known(tensor) is None:
            self.note(tensor, number)

    def input(self, tensor: Tensor) -> int:
        """Return the number of an argument of the model; assign one if it has none."""
        number = self.known(tensor)
        if number is None:
            number = self.new(tensor)
            self.inputs[number] = tensor
            self.varying.add(number)
        return number

    def number(self, tensor: Tensor) -> int:
        """Return the number of a tensor.

        Raises:
            LeftAsideError: a whole module keeps it.
            SkeletonError: a custom function made it whose call was not seen, only what its code calls.
            CaptureError: no call that was seen made it, and the model does not hold it.
        """
        number = self.known(tensor)
        if number is not None:
            if isinstance(tensor.grad_fn, BackwardCFunction) and not self._of_custom[tensor]:
                kind = type(tensor.grad_fn).__name__.removesuffix("Backward")
                raise SkeletonError(
                    f"{kind}.apply is called by another name before {line_of_user()}, which torch "
                    f"{torch.__version__} hides from a recording: write {kind}.apply(...) there"
                )
            return number
        if id(tensor) in self._paths:
            number = self.new(tensor)
            self.state[number] = self._paths[id(tensor)]
            self._versions[number] = tensor, version(tensor)
            self.varying.add(number)
            return number
        if id(tensor) in self._held:
            number = self.new(tensor)
            self.constants[number] = tensor
            return number
        shape = list(tensor.shape)
        if tensor in self.made_in:
            path = self.made_in[tensor]
            error = LeftAsideError(f"module {path!r} makes a tensor {shape} that it does not return")
            error.culprit = path
            raise error
        raise LeftAsideError(
            f"a tensor {shape} that is used at {line_of_user()} comes from nowhere that can be seen: from numpy, from "
            "compiled or transformed code (vmap), or from a global variable. Move that code into a module of its own, "
            "or keep the tensor as an attribute of the model"
        )

    def is_given(self, tensor: Tensor) -> bool:
        """Return True for a tensor with a number, and for a parameter or buffer."""
        return self.known(tensor) is not None or id(tensor) in self._paths

    def written_state(self) -> set[int]:
        """Return the numbers of the parameters and buffers that the forward has written."""
        return {number for number, (tensor, was) in self._versions.items() if version(tensor) != was}

    def sharing_memory(self, written: Sequence[Tensor]) -> frozenset[int]:
        """Return the numbers of all tensors that share memory with one of these."""
        storages = {t.untyped_storage()._cdata for t in written if t.layout is torch.strided}
        return frozenset(
            number
            for tensor, number in self._numbers.items()
            if tensor.layout is torch.strided and tensor.untyped_storage()._cdata in storages
        )
