"""Sees what a loss is made of, by calling it with the real target and an output that has shapes and no values.

Each tensor on the way is one of five: a constant; made from the target alone, with real values; made from the output,
with an extent for each sample; a scalar that is part of the loss, so that the parts of micro-batches add up to that of
the mini-batch; or lost, when a part has gone through something that sums do not go through, as a square root.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..capture import bindings_restored
from .calls import READS, Classes, Kind, Numbered, Record, Term, may_be_shared, writes
from .counting import REDUCING, arguments, divisor, ignored_index, is_over_classes
from .pair import is_pair, number
from .valueless import all_meta, without_values


class _Label(Enum):
    TARGET = auto()
    SAMPLES = auto()
    PART = auto()
    LOST = auto()


_OF_OUTPUT = frozenset({_Label.SAMPLES, _Label.PART, _Label.LOST})
_MOVES = frozenset({"to", "cpu", "cuda", "type_as"})
_ADDS = frozenset({"add", "__radd__", "sub", "__rsub__", "rsub", "subtract"})
_MULTIPLIES = frozenset({"mul", "__rmul__", "multiply"})
_DIVIDES = frozenset({"div", "true_divide", "divide", "__truediv__"})
_PICKS = frozenset(
    [
        *("__getitem__", "masked_select", "nonzero", "argwhere", "unique", "unique_consecutive", "bincount"),
        *("repeat_interleave", "split", "tensor_split", "where", "histc", "take"),
    ]
)
_SHAPES = frozenset(
    [
        *("__get__", "size", "dim", "ndimension", "numel", "nelement", "__len__", "stride", "get_device"),
        *("is_floating_point", "is_complex", "is_contiguous", "element_size", "__repr__", "__setitem__"),
    ]
)
_KEEPS = frozenset(
    [
        *("neg", "negative", "positive", "float", "double", "half", "bfloat16", "type", "clone"),
        *("contiguous", "detach", "squeeze", "unsqueeze", "reshape", "view", "flatten", "stack", "cat"),
        *("unbind", "sum", "mean", "__getitem__"),
    ]
)


def survey(
    loss_fn: Callable[..., Any],
    output: Any,
    target: Any,
    samples: int,
    whole: Record | None = None,
) -> Record:
    """What the loss is made of for one micro-batch, or for the whole mini-batch.

    Args:
        loss_fn: the loss.
        output: of no values, as :func:`pipepart.loss.valueless.shaped` makes it.
        target: with values.
        samples: how many there are.
        whole: what was seen for the mini-batch, of which this is a micro-batch.
    """
    record = _survey(loss_fn, output, target, samples, whole, keeps_reads=True)
    if not record.differs_in_reads or not record.adds_up:
        return record
    # Whether a number that is read matters shows when the mini-batch's is read: it may be for a note, or a divisor.
    other = _survey(loss_fn, output, target, samples, whole, keeps_reads=False)
    same = record.numbers == other.numbers and record.names == other.names
    return record if same else other


def _survey(
    loss_fn: Callable[..., Any],
    output: Any,
    target: Any,
    samples: int,
    whole: Record | None,
    keeps_reads: bool,
) -> Record:
    watch = _Watch(samples, whole, keeps_reads)
    given = pytree.tree_map_only(Tensor, watch.output, output)
    pytree.tree_map_only(Tensor, watch.target, target)
    try:
        kept = bindings_restored(loss_fn) if isinstance(loss_fn, nn.Module) else nullcontext()
        with torch.no_grad(), kept, watch:
            value = loss_fn(given) if target is None else loss_fn(given, target)
    except Exception:  # it needs values, which it will get: what was seen before counts
        return watch.record
    record = watch.finish(value)
    record.tape.end()
    return record


class _Watch(Numbered):
    def __init__(self, samples: int, whole: Record | None, keeps_reads: bool) -> None:
        super().__init__(whole, keeps_reads)
        self.record = Record(keeps_reads=keeps_reads)
        self._samples = samples
        self._device = torch.device("cpu")
        self._outputs = 0
        self._users: set[int] = set()  # the memory of the target
        self._uneven: set[int] = set()  # tensors whose extents hang on the target's values
        self._labels: dict[int, tuple[Tensor, _Label]] = {}  # the tensors stay, so that no id is used twice

    def output(self, tensor: Tensor) -> Tensor:
        """A tensor of the output."""
        self._device = getattr(tensor, "pipepart_device", self._device)
        if tensor.dim() == 0:
            self.record.terms.append(Term(-1, Kind.OWN, self._samples, self._outputs))
        self._mark(tensor, _Label.SAMPLES if tensor.dim() else _Label.PART)
        self._outputs += 1
        return tensor

    def target(self, tensor: Tensor) -> Tensor:
        """A tensor of the target."""
        self._mark(tensor, _Label.TARGET)
        self._users.add(tensor.untyped_storage().data_ptr())
        self.record.tape.begin(tensor)
        return tensor

    def finish(self, value: Any) -> Record:
        """What was seen, when the loss has returned ``value``."""
        self.record.complete = True
        self.record.pair = is_pair(value)
        if self.record.pair:
            count = value[1]
            unknown = count.is_meta if isinstance(count, Tensor) else math.isnan(count)
            self.record.count = None if unknown else number(count)
            self.record.count_place = self.record.tape.place(count)
            return self.record
        self.record.adds_up = isinstance(value, Tensor) and self._label(value) is _Label.PART
        return self.record

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        labels = [self._label(leaf) for leaf in leaves]
        self._share(name, leaves, labels)
        if _OF_OUTPUT.isdisjoint(labels):
            leaves = [self._device if _is_no_device(leaf) else leaf for leaf in leaves]
        given, options = pytree.tree_unflatten(leaves, spec)
        if _OF_OUTPUT.isdisjoint(labels):
            result = func(*given, **options)
            return self._of_target(func, given, options, result) if _Label.TARGET in labels else result
        if name == "__get__":
            return self._mark_all(func(*given), labels[0])
        if name in ("item", "__float__"):
            return math.nan
        if name in _MOVES:
            return self._move(leaves, labels)
        if func in REDUCING:
            return self._torch_loss(func, given, options, labels)
        result = without_values(func, name, given, options)
        picks = name in ("__getitem__", "masked_select") and _Label.TARGET in labels
        if picks or not self._uneven.isdisjoint(map(id, leaves)):
            self._uneven |= {id(leaf) for leaf in pytree.tree_leaves(result)}
        if (name.startswith("new_") or name.endswith("_like")) and result.dim() == 0:
            stand_in = torch.empty((), dtype=given[0].dtype, device=self._device)
            return func(stand_in, *given[1:], **{k: v for k, v in options.items() if k != "device"})
        return self._mark_all(result, self._outcome(name, leaves, labels, options, result))

    def _of_target(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """What a call makes of the target alone."""
        name, tape = func.__name__, self.record.tape
        leaves = pytree.tree_leaves((args, kwargs))
        if writes(name):
            tape.whole = False
        tape.add(func, args, kwargs, result)
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if not made and name not in _SHAPES:
            if name in READS and not leaves[0].dim():
                self.record.reads = True
            else:
                self.record.opaque = True
        picks = name in _PICKS and any(isinstance(leaf, Tensor) for leaf in leaves[name == "__getitem__" :])
        if picks or not self._uneven.isdisjoint(map(id, leaves)):
            self._uneven |= {id(tensor) for tensor in made}
        return self._mark_all(result, _Label.TARGET)

    def _share(self, name: str, leaves: list[Any], labels: list[_Label | None]) -> None:
        """Notes, or takes from the mini-batch, what may belong to no sample."""
        places = [index for index, label in enumerate(labels) if label is _Label.TARGET]
        small = {i: leaves[i].detach().clone() for i in places if may_be_shared(leaves[i])}
        if self.next_call(leaves, name):
            self.record.replaced = True
        self.record.differs_in_reads = self.differs_in_reads
        if not _OF_OUTPUT.isdisjoint(labels):
            self.record.numbers += [leaf for leaf in leaves if isinstance(leaf, int | float)]
        self.record.names.append(name)
        if (
            writes(name)
            and labels[0] is _Label.TARGET
            and leaves[0].untyped_storage().data_ptr() in self._users
        ):
            raise RuntimeError("the loss writes into its target")
        for index, own in small.items():
            if leaves[index].dim() == 0 and own.dim() == 0 and self._shared and float(leaves[index]):
                self.record.ratios.append(float(own) / float(leaves[index]))
        if small and not writes(name):
            self.record.shared[self._number] = small
            self.record.shared_places[self._number] = {i: self.record.tape.place(leaves[i]) for i in small}

    def _outcome(
        self, name: str, leaves: list[Any], labels: list[_Label | None], kwargs: dict[str, Any], result: Any
    ) -> _Label:
        """What the results of a call are."""
        if any(isinstance(leaf, float) and math.isnan(leaf) for leaf in leaves):
            return _Label.LOST
        if _Label.LOST in labels:
            return _Label.LOST
        if _Label.PART in labels:
            return self._of_part(name.removesuffix("_") if writes(name) else name, leaves, labels, kwargs)
        if name in _ADDS | _MULTIPLIES | _DIVIDES:
            self.record.loose.add(self._number)
        if all(tensor.dim() for tensor in pytree.tree_leaves(result) if isinstance(tensor, Tensor)):
            return _Label.SAMPLES
        if name == "sum":
            return self._term(Kind.SUM)
        if name == "mean":
            self.record.hidden |= id(leaves[0]) in self._uneven
            return self._term(Kind.MEAN, count=float(leaves[0].numel()))
        return _Label.LOST

    def _of_part(
        self, name: str, leaves: list[Any], labels: list[_Label | None], kwargs: dict[str, Any]
    ) -> _Label:
        """What becomes of a part of the loss: a part, where the parts of micro-batches still add up."""
        numbers = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor | int | float)]
        others = [index for index in numbers if labels[index] is not _Label.PART]
        tensors = [index for index in numbers if isinstance(leaves[index], Tensor)]
        if name in _KEEPS and all(
            labels[index] is _Label.PART or _is_zero(leaves[index]) for index in tensors
        ):
            if others := [index for index in tensors if labels[index] is not _Label.PART]:
                self.record.zeros[self._number] = others
            return _Label.PART
        scalars = all(not isinstance(leaves[index], Tensor) or not leaves[index].dim() for index in others)
        if not scalars or kwargs or len(numbers) != 2 or any(labels[i] is _Label.SAMPLES for i in others):
            return _Label.LOST
        self.record.loose.add(self._number)
        if name in _ADDS:
            for index in others:
                if _is_zero(leaves[index]):
                    self.record.zeros.setdefault(self._number, []).append(index)
                if not _is_zero(leaves[index]):
                    self._term(Kind.CONSTANT, count=self._samples, leaf=index)
            return _Label.PART
        if (name in _MULTIPLIES and others) or (name in _DIVIDES and others == numbers[1:]):
            return _Label.PART
        return _Label.LOST

    def _torch_loss(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], labels: list[_Label | None]
    ) -> Any:
        """One of torch's losses: not computed, only what it divides by."""
        given = arguments(func, args, kwargs)
        legacy = given.get("size_average") is not None or given.get("reduce") is not None
        whole = _Label.PART not in labels and _Label.LOST not in labels and not legacy
        result = torch.empty((), dtype=self._dtype_of(given), device="meta")
        if not whole:
            return self._mark_all(result, _Label.LOST)
        if given["reduction"] == "none":
            return self._mark_all(func(**all_meta(given)), _Label.SAMPLES)
        by_class = is_over_classes(func, given) and not given["target"].is_meta
        found = divisor(func, given if by_class else all_meta(given))
        if given["reduction"] == "sum":
            return self._mark_all(result, self._term(Kind.SUM))
        tensors = tuple(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        self.record.hidden |= not by_class and not self._uneven.isdisjoint(map(id, tensors))
        term = Term(
            self._number,
            Kind.MEAN,
            found.number,
            sum_may_stay=found.sum_may_stay,
            shapes=tuple(tensor.shape for tensor in tensors),
            classes=self._classes(given) if by_class else None,
        )
        self.record.terms.append(term)
        return self._mark_all(result, _Label.PART)

    def _classes(self, given: dict[str, Any]) -> Classes | None:
        """Where the class targets of a call come from."""
        place = self.record.tape.place
        target, weight = place(given["target"]), place(given["weight"])
        if target is None or (weight is None) != (given["weight"] is None):
            self.record.hidden = True
            return None
        return Classes(target, weight, ignored_index(given))

    def _dtype_of(self, given: dict[str, Any]) -> torch.dtype:
        tensors = (value for value in given.values() if isinstance(value, Tensor) and value.is_meta)
        return next(tensor.dtype for tensor in tensors)

    def _move(self, leaves: list[Any], labels: list[_Label | None]) -> Any:
        """``tensor.to(...)`` with or for a tensor that has no values."""
        tensor, *others = leaves
        dtypes = [other for other in others if isinstance(other, torch.dtype)]
        dtypes += [other.dtype for other in others if isinstance(other, Tensor)]
        dtype = dtypes[0] if dtypes else tensor.dtype
        if labels[0] in _OF_OUTPUT:
            return self._mark_all(torch.empty(tensor.shape, dtype=dtype, device="meta"), labels[0])
        moved = tensor.to(self._device, dtype)
        return self._of_target(Tensor.to, (tensor, self._device, dtype), {}, moved) if labels[0] else moved

    def _term(self, kind: Kind, count: float = 0.0, leaf: int = 0, sum_may_stay: bool = False) -> _Label:
        self.record.terms.append(Term(self._number, kind, count, leaf, sum_may_stay))
        return _Label.PART

    def _label(self, value: Any) -> _Label | None:
        if not isinstance(value, Tensor):
            return None
        known = self._labels.get(id(value))
        if known is not None:
            return known[1]
        # A constant has values: what has none was made from the output in a way that was not seen.
        return _Label.LOST if value.is_meta else None

    def _mark(self, tensor: Tensor, label: _Label) -> None:
        self._labels[id(tensor)] = tensor, label

    def _mark_all(self, result: Any, label: _Label | None) -> Any:
        if label is not None:
            for tensor in pytree.tree_leaves(result):
                if isinstance(tensor, Tensor):
                    self._mark(tensor, label)
        return result


def _is_no_device(value: Any) -> bool:
    """Whether it is the device of an output without values, to which a loss may send what has values."""
    return isinstance(value, torch.device) and value.type == "meta"


def _is_zero(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_meta and value.dim() == 0 and not float(value)
    return value == 0
