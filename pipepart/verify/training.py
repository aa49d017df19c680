"""Trains copies of a model for a check, each from the same start, and takes the numbers of every step."""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..capture import Chain, LayerInfo, chain_of
from ..capture.deep_copies import deep_copies
from ..data.recorded import entered
from ..data.split import MicroBatches, Splitter, least_samples, micro_batches_of
from ..input_error import InputTypeError

Optimizer = Literal["sgd", "adam"]
Reductions = Literal["mean", "sum", "batch"]
Tensors = Mapping[Any, Tensor | None]
Numbers = Mapping[str, Tensors]  # of one step: "losses", "gradients", "parameters" and "buffers", by name

# The error of a tensor is relative to its own norm, or to this part of the norm of all tensors if that is larger: a
# gradient that is zero except for rounding would otherwise have a large error.
_SMALL = 1e-2


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
        layers: as for :func:`pipepart.profile`.
        infos: of the layers of a plan, if one is given.
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
    reduction: Reductions | None
    split: Splitter | None
    strict: bool
    layers: Sequence[str] | None
    infos: Sequence[LayerInfo]

    @property
    def parts(self) -> int:
        """The number of micro-batches; at most one a sample."""
        return len(self.split_up(self.sample, self.target).inputs)

    def split_up(self, x: Any, y: Any) -> MicroBatches:
        """The micro-batches of a mini-batch."""
        return micro_batches_of(x, y, self.micro_batches, self.split, least_samples(self.model.modules()))


class Training:
    """A copy of a case's model that is being trained.

    Attributes:
        case: the case.
        model, loss_fn: the copies.
        chain: the copy's layers.
        drawn: names of layers that were seen to draw random numbers.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        model, loss_fn = copy_of(case.model, case.loss_fn, case.dtype)
        self.model = model.to(case.device)
        self.loss_fn = loss_fn.to(case.device) if isinstance(loss_fn, nn.Module) else loss_fn
        self.chain = recorded_chain(self.model, case, _cast(case.sample, case))
        self.drawn: set[str] = set()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer: torch.optim.Optimizer | None = None
        if trained and case.optimizer == "adam":
            self._optimizer = torch.optim.Adam(trained, lr=1e-3)
        elif trained:
            self._optimizer = torch.optim.SGD(trained, lr=1e-2, momentum=0.9)

    @property
    def layers(self) -> list[tuple[str, nn.Module]]:
        """Names and modules of the copy's layers."""
        return self.chain.layers

    def parts_of(self, x: Any, y: Any) -> MicroBatches:
        """The micro-batches of a mini-batch, as the first layer takes them."""
        return entered(self.chain, self.case.split_up(x, y))

    def run(
        self,
        step: Callable[[Training, Any, Any], Tensor],
        steps: int | None = None,
        *,
        recorder: AbstractContextManager[object] | None = None,
        follow: Sequence[Numbers] | None = None,
        own: Collection[str] | None = None,
    ) -> list[Numbers]:
        """Train; return the numbers of each step.

        Args:
            step: runs forward and backward of a mini-batch, (training, input, target) -> loss.
            steps: how many; by default those of the case.
            recorder: entered for the last step.
            follow: numbers of another training. After each step their parameters and buffers are taken over, so that
                rounding in one step has no effect on the next.
            own: under torchrun the parameters that belong to this process; the numbers of all processes are put
                together.
        """
        case = self.case
        count = case.steps if steps is None else steps
        found: list[Numbers] = []
        for index in range(count):
            torch.manual_seed(case.seed + index)
            random.seed(case.seed + index)
            np.random.seed((case.seed + index) % 2**32)
            x, y = _cast(case.sample, case), _cast(case.target, case)
            self.model.zero_grad(set_to_none=True)
            with recorder if recorder is not None and index == count - 1 else nullcontext():
                loss = step(self, x, y)
            here = [(name, one) for name, one in self.model.named_parameters() if own is None or name in own]
            gradients = {name: copied(parameter.grad) for name, parameter in here}
            if self._optimizer is not None:
                self._optimizer.step()
            buffers = self.model.named_buffers()
            numbers: Numbers = {
                "losses": {"": loss.detach().cpu()},
                "gradients": gradients,
                "parameters": {name: copied(tensor) for name, tensor in here},
                "buffers": {name: copied(tensor) for name, tensor in buffers if not tensor.is_meta},
            }
            found.append(numbers if own is None else _of_all_processes(numbers))
            if follow is not None:
                _take_over(self.model, follow[index])
        return found


def _of_all_processes(numbers: Numbers) -> Numbers:
    everyone: list[Numbers] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, numbers)
    return {kind: {name: one for own in everyone for name, one in own[kind].items()} for kind in numbers}


def recorded_chain(model: nn.Module, case: Case, sample: Any) -> Chain:
    """Return the chain of a model; one that is no ``nn.Sequential`` is recorded with the first micro-batch."""
    chain = chain_of(model, case.infos, layers=case.layers, split_loss=case.loss_fn is None)
    if not chain.layers:
        batch = case.split_up(sample, _cast(case.target, case))
        entered(chain, batch._replace(inputs=batch.inputs[:1]))
    return chain


def copy_of(model: nn.Module, loss_fn: Any, dtype: torch.dtype | None = None) -> tuple[nn.Module, Any]:
    """Copy a model and its loss, without gradients. What they share, the copies share.

    Args:
        model, loss_fn: the originals.
        dtype: the dtype to cast floating point numbers to; None to keep theirs.

    Raises:
        TypeError: a layer or the loss cannot be copied.
    """
    try:
        copied, loss = deep_copies(model, loss_fn)
    except Exception as error:
        raise InputTypeError(
            f"a check trains copies, and {_uncopied(model)} cannot be copied: copy.deepcopy raises "
            f"{type(error).__name__}: {error}. Give it a __deepcopy__, or keep what cannot be copied outside of it"
        ) from error
    copied.zero_grad(set_to_none=True)
    if dtype is not None:
        seen: dict[Tensor, Tensor] = {}
        for module in (copied, *([loss] if isinstance(loss, nn.Module) else [])):
            _cast_module(module, dtype, seen)
        loss = _cast_bound(loss, dtype)
    return copied, loss


def own_dtype(model: nn.Module, sample: Any) -> str:
    """The floating point dtypes of a model's parameters and buffers, or of its sample if it has none, as a name."""
    for items in ([*model.parameters(), *model.buffers()], pytree.tree_leaves(sample)):
        found = {str(t.dtype) for t in items if isinstance(t, Tensor) and t.is_floating_point()}
        if found:
            return ", ".join(sorted(name.removeprefix("torch.") for name in found))
    return "own"


def copied(tensor: Tensor | None) -> Tensor | None:
    """A dense copy on the CPU."""
    if tensor is None:
        return None
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    return dense.cpu().clone()


def tensor_errors(ours: Tensors, theirs: Tensors) -> dict[Any, float]:
    """The relative error of each tensor, by norm.

    0 if it is equal bit for bit, where NaN equals NaN. Infinite if only one side has it, or finite numbers in it.
    """
    floor = _SMALL * math.hypot(*(_norm(tensor) for tensor in theirs.values() if tensor is not None), 0.0)
    names = dict.fromkeys([*theirs, *ours])
    return {name: _error(ours.get(name), theirs.get(name), floor) for name in names}


def errors(ours: Sequence[Numbers], theirs: Sequence[Numbers]) -> dict[str, float | None]:
    """The largest error of any step for each kind of numbers; None if there are none of a kind."""
    found: dict[str, float | None] = {}
    for kind, first in theirs[0].items():
        of_steps = [tensor_errors(a[kind], b[kind]).values() for a, b in zip(ours, theirs, strict=True)]
        some = any(tensor is not None for tensor in first.values())
        found[kind] = max(error for step in of_steps for error in step) if some else None
    return found


def error_of_steps(ours: Sequence[Numbers], theirs: Sequence[Numbers]) -> float:
    """The largest error of any loss or gradient."""
    found = errors(ours, theirs)
    return max(found["losses"] or 0.0, found["gradients"] or 0.0)


def first_different_step(ours: Sequence[Numbers], theirs: Sequence[Numbers], allowed: float) -> int | None:
    """The first step in which anything differs by more than ``allowed``."""
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if max(error or 0.0 for error in errors([mine], [other]).values()) > allowed:
            return step
    return None


def _error(ours: Tensor | None, theirs: Tensor | None, floor: float) -> float:
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return math.inf
    if ours.equal(theirs) or bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all()):
        return 0.0
    size = max(_norm(ours), _norm(theirs), floor)
    off = _norm(_wide(ours) - _wide(theirs))
    # The difference of two neighbouring numbers may be 0 in the norm; it must not count as bit for bit.
    return max(off / size, math.ulp(0.0)) if math.isfinite(off) and math.isfinite(size) else math.inf


def _norm(tensor: Tensor) -> float:
    return float(_wide(tensor).norm())


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _cast(nest: Any, case: Case) -> Any:
    """Copy a nest of tensors to the case's device, and floating point numbers to its dtype."""

    def one(tensor: Tensor) -> Tensor:
        wanted = case.dtype if case.dtype is not None and tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to(case.device, wanted, copy=True).requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(Tensor, one, nest)


def _cast_module(module: nn.Module, dtype: torch.dtype, seen: dict[Tensor, Tensor]) -> None:
    """Cast in place. A parameter or buffer with two names stays one tensor."""
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
    for name, layer in chain_of(model).places:
        try:
            copy.deepcopy(layer)
        except Exception:
            return f"layer {name!r} ({type(layer).__name__})"
    return "the model with its loss"


@torch.no_grad()
def _take_over(model: nn.Module, numbers: Numbers) -> None:
    values = {**numbers["parameters"], **numbers["buffers"]}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        value = values.get(name)
        if value is not None and value.shape == tensor.shape:
            tensor.copy_(value if value.layout == tensor.layout else value.to_sparse(layout=tensor.layout))
