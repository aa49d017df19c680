"""LayerInfo: the parameters, buffers and output tensors of one layer."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field, field_validator

from ..document import ByteCount, Value
from ..input_error import InputError


class TensorSpec(Value):
    """Shape and dtype of one tensor."""

    shape: tuple[Annotated[int, Field(ge=0)], ...]
    dtype: str

    @field_validator("dtype")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if not isinstance(getattr(torch, name, None), torch.dtype):
            raise InputError(f"torch has no dtype {name!r}")
        return name

    @property
    def bytes(self) -> int:
        """Size in bytes of a dense tensor of this shape."""
        size: int = getattr(torch, self.dtype).itemsize
        for extent in self.shape:
            size *= extent
        return size

    @property
    def text(self) -> str:
        """Dtype and shape as text, such as ``float32[8, 64]``."""
        return f"{self.dtype}{list(self.shape)}"

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Describe a tensor."""
        return cls(shape=tuple(int(n) for n in tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


class SharedTensor(Value):
    """A parameter or buffer of a layer that an earlier layer also holds.

    Attributes:
        layer: the first layer that holds it.
        name: its path in that layer, as in ``"weight"``.
        bytes: its size.
        gradient_bytes: the size of its gradient; 0 for a buffer or a frozen parameter.
    """

    layer: str
    name: str
    bytes: ByteCount
    gradient_bytes: ByteCount = 0


class LayerInfo(Value):
    """Description of one layer. A tensor in several layers counts only in the bytes of the first.

    Attributes:
        name: path of the layer in the user's model, as in ``"features.3"``.
        kind: name of its class.
        description: its class and arguments, as its ``repr`` gives them.
        parameter_bytes: size of its parameters, without shared ones.
        gradient_bytes: size of the gradients of these parameters.
        buffer_bytes: size of its buffers, without shared ones.
        dtypes: floating point and complex dtypes of its parameters and buffers.
        shared: its parameters and buffers that an earlier layer also holds.
        outputs: the tensors it returns for one micro-batch; empty if the layer was not run.
        modules: of a recorded model: paths of the modules that the layer calls, in order.
        tensors: of a recorded model: paths of the parameters and buffers that it uses beside them.
    """

    name: str
    kind: str
    description: str
    parameter_bytes: ByteCount
    gradient_bytes: ByteCount
    buffer_bytes: ByteCount = 0
    dtypes: tuple[str, ...] = ()
    shared: tuple[SharedTensor, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    modules: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()

    @property
    def shares_with(self) -> tuple[str, ...]:
        """Names of the earlier layers that own the tensors in ``shared``."""
        return tuple(sorted({tensor.layer for tensor in self.shared}))

    @property
    def output_bytes(self) -> int:
        """Size of the output tensors in bytes."""
        return sum(spec.bytes for spec in self.outputs)
