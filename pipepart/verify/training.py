"""One training of a check: the same start, mini-batch, random states and optimizer, whoever runs its steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..capture import flatten
from ..data.split import MicroBatches, Splitter, micro_batches_of
from .copies import cast, copy_of
from .numbers import Numbers, buffers_of, gradients_of, parameters_of

Optimizer = Literal["sgd", "adam"]
Step = Callable[[Any, Any], Tensor]  # input and target of a mini-batch; gradients are added to the model's


@dataclass(frozen=True)
class Case:
    """What is trained, of which every training gets a copy of its own.

    Attributes:
        model, sample, target, loss_fn: the user's; the sample is one argument or several, as Arguments.
        dtype: of the copies, None for their own.
        device: of the plain model and the mini-batch.
        micro_batches: parts of the mini-batch.
        steps, optimizer, seed: of the training.
        reduction: of the loss, if it was said.
        split: the user's way to make micro-batches.
        strict: whether virtual devices are.
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
    reduction: Literal["mean", "sum"] | None = None
    split: Splitter | None = None
    strict: bool = False

    @property
    def parts(self) -> int:
        """How many micro-batches there are: no more than samples."""
        return len(self.split_up(self.sample, self.target).inputs)

    def split_up(self, x: Any, y: Any) -> MicroBatches:
        """The micro-batches of a copy of the mini-batch."""
        return micro_batches_of(x, y, self.micro_batches, self.split)

    def start(self) -> Training:
        """A training at its start."""
        model, loss_fn = copy_of(self.model, self.loss_fn, self.dtype)
        return Training(self, model.to(self.device), _on(loss_fn, self.device))


class Training:
    """A copy of the model that is being trained.

    Attributes:
        case: what it is a copy of.
        model, loss_fn: the copy.
        layers: of the model, with their names.
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
        watched: AbstractContextManager[object] | None = None,
        follow: Sequence[Numbers] | None = None,
    ) -> list[Numbers]:
        """Trains.

        Args:
            step: runs forward and backward.
            steps: how many; all by default.
            watched: entered for the last step.
            follow: the numbers of another training, whose state is taken over after each step: what was rounded
                in one is not carried on into the next, where a ReLU may make much of it.
        """
        count = self.case.steps if steps is None else steps
        found = []
        for index in range(count):
            _seed(self.case.seed + index)
            x, y = (
                cast(nest, self.case.dtype, self.case.device) for nest in (self.case.sample, self.case.target)
            )
            self.model.zero_grad(set_to_none=True)
            with watched if watched is not None and index == count - 1 else nullcontext():
                loss = step(x, y)
            gradients = gradients_of(self.model)
            if self._optimizer is not None:
                self._optimizer.step()
            found.append(
                Numbers(loss.detach().cpu(), gradients, parameters_of(self.model), buffers_of(self.model))
            )
            if follow is not None:
                _take_over(self.model, follow[index])
        return found


def _optimizer(model: nn.Module, name: Optimizer) -> torch.optim.Optimizer | None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        return None
    return (
        torch.optim.Adam(trained, lr=1e-3)
        if name == "adam"
        else torch.optim.SGD(trained, lr=1e-2, momentum=0.9)
    )


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@torch.no_grad()
def _take_over(model: nn.Module, numbers: Numbers) -> None:
    for held, wanted in (
        (model.named_parameters(), numbers.parameters),
        (model.named_buffers(), numbers.buffers),
    ):
        for name, tensor in held:
            value = wanted.get(name)
            if value is not None and value.shape == tensor.shape:
                alike = value.layout == tensor.layout
                tensor.copy_(value if alike else value.to_sparse(layout=tensor.layout))


def _on(loss_fn: Any, device: torch.device) -> Any:
    return loss_fn.to(device) if isinstance(loss_fn, nn.Module) else loss_fn
