"""Trains copies of a model for a check, all from the same start, and records the numbers of every step."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..capture import Chain, LayerInfo, chain_of
from ..data.recorded import entered
from ..data.split import MicroBatches, Splitter, least_samples, micro_batches_of
from ..loss import Reduction, StepLoss
from .copies import cast, copy_of, take_over
from .numbers import Numbers, copied

Optimizer = Literal["sgd", "adam"]
Reductions = Literal["mean", "sum", "batch"]


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
        """The number of micro-batches, at most the number of samples."""
        return len(self.split_up(self.sample, self.target).inputs)

    def split_up(self, x: Any, y: Any) -> MicroBatches:
        """Split a mini-batch into micro-batches."""
        return micro_batches_of(x, y, self.micro_batches, self.split, least_samples(self.model.modules()))

    def step_loss(self, loss_fn: Callable[..., Any]) -> StepLoss:
        """Return the loss of the steps, which calls ``loss_fn``."""
        return StepLoss(loss_fn, Reduction(self.reduction) if self.reduction else None)

    def cast(self, nest: Any) -> Any:
        """Copy a nest of tensors to the device and the dtype of this case."""
        return cast(nest, self.device, self.dtype)


class Training:
    """Training of one copy of a case's model.

    Attributes:
        case: the case.
        model, loss_fn: the copies.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        model, loss_fn = copy_of(case.model, case.loss_fn, case.dtype)
        self.model = model.to(case.device)
        self.loss_fn = loss_fn.to(case.device) if isinstance(loss_fn, nn.Module) else loss_fn
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer: torch.optim.Optimizer | None = None
        if trained and case.optimizer == "adam":
            self._optimizer = torch.optim.Adam(trained, lr=1e-3)
        elif trained:
            self._optimizer = torch.optim.SGD(trained, lr=1e-2, momentum=0.9)

    @cached_property
    def chain(self) -> Chain:
        """The copy's chain of layers, for a pipeline. A model that is no ``nn.Sequential`` is recorded first."""
        case = self.case
        chain = chain_of(
            self.model, case.infos, layers=case.layers, verify="never", split_loss=case.loss_fn is None
        )
        if not chain.layers:
            batch = case.split_up(case.cast(case.sample), case.cast(case.target))
            entered(chain, batch._replace(inputs=batch.inputs[:1]))
        return chain

    def run(
        self,
        step: Callable[[Training, Any, Any], Tensor],
        steps: int | None = None,
        *,
        recorder: AbstractContextManager[object] | None = None,
        follow: Sequence[Numbers] | None = None,
        own: Collection[str] | None = None,
    ) -> list[Numbers]:
        """Train and return the numbers of each step.

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
        steps_run: list[Numbers] = []
        for index in range(count):
            torch.manual_seed(case.seed + index)
            random.seed(case.seed + index)
            np.random.seed((case.seed + index) % 2**32)
            x, y = case.cast(case.sample), case.cast(case.target)
            self.model.zero_grad(set_to_none=True)
            with recorder if recorder is not None and index == count - 1 else nullcontext():
                loss = step(self, x, y)
            here = [
                (name, each) for name, each in self.model.named_parameters() if own is None or name in own
            ]
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
            steps_run.append(numbers if own is None else _of_all_processes(numbers))
            if follow is not None:
                take_over(self.model, {**follow[index]["parameters"], **follow[index]["buffers"]})
        return steps_run


def _of_all_processes(numbers: Numbers) -> Numbers:
    everyone: list[Numbers] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, numbers)
    return {
        kind: {name: value for numbers_here in everyone for name, value in numbers_here[kind].items()}
        for kind in numbers
    }
