"""Computes the gradients of a layer's weights from its input and the gradient of its output.

A formula calls the same kernels as an autograd node of a known type, on the same shapes and strides (see torch's
derivatives.yaml and FunctionsManual.cpp), so the results are equal to the bit. It holds the tensors that the kernels
need, but not the node, which would keep the graph alive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dtensors import is_dtensor
from .in_place import version


class Saved:
    """The object that our ``saved_tensors_hooks`` pack a tensor into. Autograd holds it, and deletes it after use.

    Args:
        tensor: without its graph: an output of the node that saves it would keep that node alive.
    """

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.hold(tensor)

    def hold(self, tensor: Tensor) -> None:
        """Hold another tensor of equal values, with its present version."""
        self.tensor = tensor
        self.version = version(tensor)

    @property
    def is_overwritten(self) -> bool:
        """True if the tensor was written in place since it was saved."""
        return version(self.tensor) != self.version


def unpacked(held: Any) -> Tensor:
    """Return the saved tensor; the unpack hook.

    Raises:
        RuntimeError: it was written in place. Autograd does not check tensors that a hook returns.
    """
    if not isinstance(held, Saved):
        return held
    if held.is_overwritten:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(held.tensor.shape)} is at version {version(held.tensor)}, and was saved at version "
            f"{held.version}"
        )
    return held.tensor


class Formula(NamedTuple):
    """How to compute the weight gradients of one node later.

    Attributes:
        kept: the tensors that the gradients depend on, apart from the gradient of the output.
        gradients: takes the gradient of the output; returns one gradient for each requested slot, in their order.
    """

    kept: tuple[Tensor, ...]
    gradients: Callable[[Tensor], Sequence[Tensor]]


class Known(NamedTuple):
    """A type of autograd node with a formula for its weight gradients.

    Attributes:
        slots: the inputs of the node that can be weights. Only the first one is worth deferring by itself.
        read: takes a node that has not run and the slots, in order, that are weights.
    """

    slots: tuple[int, ...]
    read: Callable[[Any, Sequence[int]], Formula]


class _NotPlainError(Exception):
    """A tensor that a formula cannot handle as the node would."""


def read_formula(known: Known, node: Any, slots: Sequence[int]) -> Formula | None:
    """Return the weight gradient formula of a node for some of its inputs; None if no formula is known to be exact."""
    if known.slots[0] not in slots:
        return None
    try:
        return known.read(node, slots)
    except (AttributeError, RuntimeError, _NotPlainError):
        # Another version of torch may save other attributes. Autograd itself reports a saved tensor that was
        # overwritten.
        return None


def _addmm(node: Any, slots: Sequence[int]) -> Formula:
    if node._saved_alpha != 1 or node._saved_beta != 1:
        raise _NotPlainError
    # Autograd sums the gradient of the bias to its shape, as it does after the node.
    return _product(_saved(node, "mat1"), _by_column(node), biased=len(slots) > 1)


def _mm(node: Any, slots: Sequence[int]) -> Formula:
    return _product(_saved(node, "self"), _by_column(node), biased=False)


def _product(factor: Tensor, by_column: bool, *, biased: bool) -> Formula:
    def gradients(gradient: Tensor) -> Sequence[Tensor]:
        weight = gradient.t().mm(factor).t() if by_column else factor.t().mm(gradient)
        return (weight, gradient) if biased else (weight,)

    return Formula((factor,), gradients)


def _by_column(node: Any) -> bool:
    """Return True if the weight is column-major, like a transposed one; its gradient then is column-major too."""
    stride, size = node._saved_mat2_sym_strides, node._saved_mat2_sym_sizes
    return stride[0] == 1 and stride[1] == size[0]


def _convolution(node: Any, slots: Sequence[int]) -> Formula:
    if node.next_functions[2][0] is not None and 2 not in slots:
        raise _NotPlainError  # one kernel makes both
    inputs, weight = _saved(node, "input"), _saved(node, "weight")
    settings = (
        node._saved_bias_sym_sizes_opt,
        node._saved_stride,
        node._saved_padding,
        node._saved_dilation,
        node._saved_transposed,
        node._saved_output_padding,
        node._saved_groups,
        [slot in slots for slot in (0, 1, 2)],
    )

    def gradients(gradient: Tensor) -> Sequence[Tensor]:
        results = torch.ops.aten.convolution_backward.default(gradient, inputs, weight, *settings)
        return [results[slot] for slot in slots]

    return Formula((inputs,), gradients)


def _saved(node: Any, name: str) -> Tensor:
    """Return a tensor that a node has saved, without its graph."""
    if getattr(node, f"_raw_saved_{name}").unpack_hook not in (None, unpacked):
        raise _NotPlainError  # unpacking computes it, as under a checkpoint, and may be done only once
    tensor = getattr(node, f"_saved_{name}").detach()
    plain = type(tensor) is Tensor or is_dtensor(tensor)
    if not plain or tensor.layout is not torch.strided or tensor.is_complex():
        raise _NotPlainError
    return tensor


# The nodes of linear layers, attention projections and convolutions. Weights of normalisation layers are not deferred:
# the tensors kept for them would cost more than the computation. Embeddings are in the first stage, whose gradients of
# inputs nobody waits for.
KNOWN: Mapping[str, Known] = {
    "AddmmBackward0": Known((2, 0), _addmm),
    "MmBackward0": Known((1,), _mm),
    "ConvolutionBackward0": Known((1, 2), _convolution),
}
