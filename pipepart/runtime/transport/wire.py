"""Converts messages between stages to plain bytes and a form that describes their layout, and back.

A message is a nest of tensors. Tensors that share memory are sent as one buffer and share memory again on the other
side: of each storage the range that its tensors use, which begins at a multiple of 64 bytes, as vectorized kernels of
the CPU round differently at other alignments. The form is agreed once and then only compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...capture import Live, Recording
from ...input_error import InputTypeError

_ALIGNMENT = 64  # bytes
_ONE = pytree.tree_structure(0)  # of a message that is one tensor


class TensorForm(NamedTuple):
    """One tensor of a message: a view of one of its buffers."""

    buffer: int
    offset: int  # elements
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool


class Form(NamedTuple):
    """All of a message but the bytes of its tensors.

    Attributes:
        leaves: in the order of the nest; a value that is no tensor stands for itself.
        nest: of the leaves; None for a list, which gradients are. Compressed tensors are nests themselves.
        kind: the type of a message of live values, whose recording is not sent: that of the micro-batch stands for it.
        buffers: bytes of each buffer.
        whole: whether it is a single tensor, whose memory is sent as it is.
    """

    leaves: tuple[TensorForm | Any, ...]
    nest: pytree.TreeSpec | None
    kind: type[Live] | None
    buffers: tuple[int, ...]
    whole: bool = False

    def __reduce__(self) -> Any:
        """Pickle a nest of numbers in place of torch's description of one, which has no stable form."""
        nest = None if self.nest is None else pytree.tree_unflatten(range(len(self.leaves)), self.nest)
        return _form_with, (self.leaves, self.nest is not None, nest, *self[2:])


def pack(message: Any) -> tuple[Form, list[Tensor]]:
    """Return the form of a message and its buffers: contiguous tensors that share memory with its own."""
    content = message[0] if type(message) is list and len(message) == 1 else message
    if type(content) is Tensor and content.layout is torch.strided and _is_whole(content):  # sent as it is
        form = TensorForm(0, 0, content.dtype, tuple(content.shape), content.stride(), content.requires_grad)
        nest = _ONE if content is message else None
        return Form((form,), nest, None, (content.nbytes,), True), [content.detach()]
    kind = type(message) if isinstance(message, Live) else None
    values = list(message.tensors) if isinstance(message, Live) else message
    if type(values) is list and not any(isinstance(value, tuple) for value in values):
        leaves, nest = values, None
    else:
        leaves, nest = pytree.tree_flatten(values)
    ranges: dict[int, _Range] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            _check_plain(leaf)
            storage = leaf.untyped_storage()
            ranges.setdefault(storage._cdata, _Range(len(ranges), storage)).add(leaf)
    forms = tuple(_form(leaf, ranges) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    buffers = [span.bytes() for span in ranges.values()]
    return Form(forms, nest, kind, tuple(len(buffer) for buffer in buffers)), buffers


def _is_whole(tensor: Tensor) -> bool:
    """Return True if a tensor is its whole memory."""
    plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return plain and tensor.untyped_storage().nbytes() == tensor.nbytes


def buffers_for(form: Form, device: torch.device | None = None) -> list[Tensor]:
    """Return buffers to receive the message of a form in, in host memory or on a device."""
    if form.whole:
        (leaf,) = form.leaves
        return [torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=device)]
    return [torch.empty(size, dtype=torch.uint8, device=device) for size in form.buffers]


def _form_with(leaves: Any, has_nest: bool, nest: Any, *others: Any) -> Form:
    return Form(leaves, pytree.tree_structure(nest) if has_nest else None, *others)


def unpack(form: Form, buffers: Sequence[Tensor], recording: Recording | None) -> Any:
    """Return the message of a form, on its buffers."""
    if form.whole:
        tensor = buffers[0].requires_grad_(form.leaves[0].requires_grad)
        return [tensor] if form.nest is None else tensor
    leaves = [_tensor(leaf, buffers) if isinstance(leaf, TensorForm) else leaf for leaf in form.leaves]
    values = leaves if form.nest is None else pytree.tree_unflatten(leaves, form.nest)
    if form.kind is not None:
        assert recording is not None
        return form.kind(recording, values)
    return values


class _Range:
    """The range of one storage that the tensors of a message use."""

    def __init__(self, number: int, storage: torch.UntypedStorage) -> None:
        self.number = number
        self.first, self.end = storage.nbytes(), 0
        self._storage = storage
        self._device = storage.device

    def add(self, tensor: Tensor) -> None:
        """Include a tensor."""
        if not tensor.numel():
            return
        size = tensor.element_size()
        first = int(tensor.storage_offset()) * size
        reach = sum(
            int(extent - 1) * int(step) for extent, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        self.first = min(self.first, first - first % _ALIGNMENT)
        self.end = max(self.end, first + (reach + 1) * size)

    def bytes(self) -> Tensor:
        """Return the range as bytes."""
        count = max(self.end - self.first, 0)
        offset = self.first if count else 0
        view: Any = torch.empty(0, dtype=torch.uint8, device=self._device)
        return view.set_(self._storage, offset, (count,))


def _form(tensor: Tensor, ranges: dict[int, _Range]) -> TensorForm:
    span = ranges[tensor.untyped_storage()._cdata]
    size = tensor.element_size()
    offset = int(tensor.storage_offset()) - span.first // size if tensor.numel() else 0
    return TensorForm(
        span.number, offset, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad
    )


def _tensor(form: TensorForm, buffers: Sequence[Tensor]) -> Tensor:
    buffer = buffers[form.buffer]
    view: Any = torch.empty(0, dtype=form.dtype, device=buffer.device)
    view.set_(buffer.untyped_storage(), form.offset, form.shape, form.stride)
    return view.requires_grad_(form.requires_grad)


def _check_plain(tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or type(tensor) not in (Tensor, torch.nn.Parameter):
        kind = type(tensor).__name__ if tensor.layout is torch.strided else f"{tensor.layout} tensor"
        raise InputTypeError(
            f"a stage passes a {kind} {list(tensor.shape)} to a stage of another rank, which only plain tensors can "
            "go to: put the layers on both sides of it into one stage (pipepart.plan(..., colocate=...))"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise InputTypeError(
            f"a stage passes a tensor {list(tensor.shape)} with a lazy conjugate or negation to a stage of another "
            "rank: return tensor.resolve_conj() or tensor.resolve_neg() from its last layer"
        )
