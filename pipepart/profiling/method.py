"""Method: a way to profile layers, all at once, one at a time, or estimated; and the micro-batch that it profiles."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ..autograd.own_copy import own_copy, tensors
from ..capture import Chain, Live, loss_of
from ..data.recorded import entered
from ..data.split import MicroBatches
from ..loss import sum_of
from .layer_pass import Loss, fresh
from .memory import Memory
from .timing import LayerTimes


@dataclass(frozen=True)
class Task:
    """What is to be profiled.

    Attributes:
        chain: the layers of the model.
        loss_fn: the loss; None for that of the model, or for none.
        device: where to measure.
        threads: intra-operation threads; None on an accelerator.
        devices: how many virtual devices will share the CPU.
        seconds: time to spend on each size.
        share: whether to time only one of several equal layers.
        stop: a pass ends once this event is set.
    """

    chain: Chain
    loss_fn: Callable[..., Any] | None
    device: torch.device
    threads: int | None
    devices: int
    seconds: float
    share: bool
    stop: threading.Event

    @property
    def devices_at_once(self) -> int:
        """How many devices of the CPU compute at once: as many as there are cores for. 1 on an accelerator."""
        cores = os.cpu_count() or 1
        return max(1, min(self.devices, cores // (self.threads or 1))) if self.device.type == "cpu" else 1

    @property
    def loss_module(self) -> nn.Module | None:
        """The loss, if it is a module."""
        return self.loss_fn if isinstance(self.loss_fn, nn.Module) else None

    @property
    def everything(self) -> nn.Module:
        """The model, together with a loss that is a module."""
        return nn.ModuleList([self.chain.model, *filter(None, [self.loss_module])])


class MicroBatch(NamedTuple):
    """The micro-batch that is profiled, and how many there are.

    Attributes:
        value: its input.
        loss: of its output.
        counted_loss: the same with a target that is brought to the device first, as in a step, to count memory.
        target_bytes: size of the target.
        samples: in it.
        parts: how many micro-batches there are.
    """

    value: Any
    loss: Loss
    counted_loss: Loss
    target_bytes: int
    samples: int
    parts: int


class Measured(NamedTuple):
    """What was measured for one number of micro-batches.

    Attributes:
        part: the largest micro-batch, which has the most memory.
        times: of each layer, and of the loss as the last if there is one.
        memory: of each layer.
        like: for each layer the index of the one that was timed for it, mostly its own.
        repeats: how often each of these was timed, at least.
        scale: seconds of each micro-batch relative to their mean, if they have different sizes.
    """

    part: MicroBatch
    times: list[LayerTimes]
    memory: Memory
    like: list[int]
    repeats: int
    scale: tuple[float, ...] = ()


class Method(ABC):
    """A way to profile the layers of a chain."""

    def __init__(self, task: Task) -> None:
        self.task = task

    @abstractmethod
    def running(self) -> AbstractContextManager[None]:
        """Return a context within which layers can run. Behind it the model is as it was before."""

    def prepare(self, part: MicroBatches) -> tuple[Any, Any]:
        """Return copies of input and target of a micro-batch, as the first layer and the loss take them."""
        taken = entered(self.task.chain, part)
        return fresh(taken.inputs[0]), fresh(taken.targets[0])

    @abstractmethod
    def measure(self, part: MicroBatch, done: Callable[[float], None]) -> Measured:
        """Return the times and the memory of each layer.

        Args:
            part: the micro-batch.
            done: called with the part that is done, from 0 to 1.
        """


def micro_batch_of(method: Method, parts: MicroBatches, samples: int) -> MicroBatch:
    """Return the first of the micro-batches that has so many samples, where the method needs it."""
    index = parts.sizes.index(samples)
    value, target = method.prepare(
        parts._replace(inputs=[parts.inputs[index]], targets=[parts.targets[index]], sizes=[samples])
    )
    loss_fn = method.task.loss_fn
    if loss_fn is None and not (isinstance(value, Live) and value.recording.loss is not None):
        return MicroBatch(value, None, None, 0, samples, len(parts.sizes))
    loss_fn = loss_fn or loss_of
    targets = () if target is None else (target,)

    def loss(output: Any) -> torch.Tensor:
        return sum_of(loss_fn(output, *targets))

    def counted_loss(output: Any) -> torch.Tensor:
        return sum_of(loss_fn(output, *own_copy(targets)))

    size = sum(tensor.nbytes for tensor in tensors(targets))
    return MicroBatch(value, loss, counted_loss, size, samples, len(parts.sizes))
