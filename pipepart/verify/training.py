"""Trains copies of a model for a check: each from the same start, on the same mini-batch, with the same seeds."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..capture import flatten
from ..capture.deep_copies import deep_copies
from ..data.split import MicroBatches, Splitter, least_samples, micro_batches_of
from .numbers import Numbers, gradients_of

Optimizer = Literal["sgd", "adam"]
Reductions = Literal["mean", "sum", "batch"]
Step = Callable[
    [Any, Any], Tensor
]  # takes input and target of a mini-batch; adds gradients to the model's parameters


@dataclass(frozen=True)
class Case:
    """The settings that all trainings of a check share.

    Attributes:
        model, sample, target, loss_fn: the user's; the sample is one argument, or several as Arguments.
        dtype: the dtype that copies are cast to; None to keep theirs.
        device: the device of the plain model and the mini-batch.
        micro_batches: the number of micro-batches.
        steps, optimizer, seed: how to train.
        reduction, split, strict: as for :class:`pipepart.Pipeline`.
    """

    model: nn.Module
    sample: Any
    target: Any
    loss_fn: Callable[..., Any] | None
    dtype: torch.dtype | None
    device: torch.device
    micro_batches: int
    steps: int
    optimizer: Optimizer
    seed: int
    reduction: Reductions | None = None
    split: Splitter | None = None
    strict: bool = False

    @property
    def parts(self) -> int:
        """The number of micro-batches; at most one a sample."""
        return len(self.split_up(self.sample, self.target).inputs)

    def split_up(self, x: Any, y: Any) -> MicroBatches:
        """The micro-batches of a mini-batch."""
        least = least_samples(self.model.modules())
        return micro_batches_of(x, y, self.micro_batches, self.split, least)

    def start(self) -> Training:
        """A training of new copies."""
        model, loss_fn = copy_of(self.model, self.loss_fn, self.dtype)
        loss_fn = loss_fn.to(self.device) if isinstance(loss_fn, nn.Module) else loss_fn
        return Training(self, model.to(self.device), loss_fn)


class Training:
    """A copy of the model that is being trained.

    Attributes:
        case: the case that it belongs to.
        model, loss_fn: the copies.
        layers: names and modules of the copy's layers.
        drawn: names of layers that were seen to draw random numbers.
    """

    def __init__(self, case: Case, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self.case = case
        self.model = model
        self.loss_fn = loss_fn
        self.layers = flatten(model)
        self.drawn: set[str] = set()
        model.zero_grad(set_to_none=True)
        self._optimizer = _optimizer(model, case.optimizer)

    def run(
        self,
        step: Step,
        steps: int | None = None,
        *,
        recorder: AbstractContextManager[object] | None = None,
        follow: Sequence[Numbers] | None = None,
    ) -> list[Numbers]:
        """Train.

        Args:
            step: runs forward and backward.
            steps: how many; by default those of the case.
            recorder: entered for the last step.
            follow: numbers of another training. After each step their parameters and buffers are taken over, so that
                rounding in one step has no effect on the next.
        """
        count = self.case.steps if steps is None else steps
        found = []
        for index in range(count):
            _seed(self.case.seed + index)
            x, y = (
                _cast(nest, self.case.dtype, self.case.device)
                for nest in (self.case.sample, self.case.target)
            )
            self.model.zero_grad(set_to_none=True)
            with recorder if recorder is not None and index == count - 1 else nullcontext():
                loss = step(x, y)
            gradients = gradients_of(self.model)
            if self._optimizer is not None:
                self._optimizer.step()
            found.append(Numbers.of(loss, gradients, self.model))
            if follow is not None:
                _take_over(self.model, follow[index])
        return found


def copy_of(model: nn.Module, loss_fn: Any, dtype: torch.dtype | None) -> tuple[nn.Module, Any]:
    """Copy a model and its loss. What they share, the copies share.

    Args:
        model, loss_fn: the originals.
        dtype: the dtype to cast floating point numbers to; None to keep theirs.

    Raises:
        TypeError: a layer or the loss cannot be copied.
    """
    try:
        copied, loss = deep_copies(model, loss_fn)
    except Exception as error:
        raise TypeError(
            f"a check trains copies, and {_uncopied(model)} cannot be copied: copy.deepcopy raises "
            f"{type(error).__name__}: {error}. Give it a __deepcopy__, or keep what cannot be copied outside of it"
        ) from error
    if dtype is not None:
        seen: dict[Tensor, Tensor] = {}
        for module in (copied, *([loss] if isinstance(loss, nn.Module) else [])):
            _cast_module(module, dtype, seen)
        loss = _cast_bound(loss, dtype)
    return copied, loss


def own_dtype(model: nn.Module, sample: Any) -> str:
    """The floating point dtypes of a model's parameters and buffers, or of its sample if it has none, as a name."""
    state = [*model.parameters(), *model.buffers()]
    found = _floating(state) or _floating(pytree.tree_leaves(sample))
    return ", ".join(found) or "own"


def _floating(items: list[Any]) -> list[str]:
    tensors = [item for item in items if isinstance(item, Tensor) and item.is_floating_point()]
    return sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})


def _cast(nest: Any, dtype: torch.dtype | None, device: torch.device) -> Any:
    """Copy a nest of tensors to a device, and floating point numbers to a dtype."""

    def one(tensor: Tensor) -> Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to(device, wanted, copy=True).requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(Tensor, one, nest)


def _cast_module(module: nn.Module, dtype: torch.dtype, seen: dict[Tensor, Tensor]) -> None:
    """Cast in place. A parameter or buffer with two names stays one tensor."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = seen.setdefault(buffer, buffer.to(dtype))


def _cast_bound(loss_fn: Any, dtype: torch.dtype) -> Any:
    """Cast the tensors that ``functools.partial`` has bound to a loss, such as class weights."""
    if not isinstance(loss_fn, functools.partial):
        return loss_fn
    args, keywords = pytree.tree_map_only(
        Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (loss_fn.args, loss_fn.keywords)
    )
    return functools.partial(_cast_bound(loss_fn.func, dtype), *args, **keywords)


def _uncopied(model: nn.Module) -> str:
    for name, layer in flatten(model):
        try:
            copy.deepcopy(layer)
        except Exception:
            return f"layer {name!r} ({type(layer).__name__})"
    return "the model with its loss"


def _optimizer(model: nn.Module, name: Optimizer) -> torch.optim.Optimizer | None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        return None
    if name == "adam":
        return torch.optim.Adam(trained, lr=1e-3)
    return torch.optim.SGD(trained, lr=1e-2, momentum=0.9)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@torch.no_grad()
def _take_over(model: nn.Module, numbers: Numbers) -> None:
    for own, wanted in (
        (model.named_parameters(), numbers.parameters),
        (model.named_buffers(), numbers.buffers),
    ):
        for name, tensor in own:
            value = wanted.get(name)
            if value is not None and value.shape == tensor.shape:
                same_layout = value.layout == tensor.layout
                tensor.copy_(value if same_layout else value.to_sparse(layout=tensor.layout))
