"""Method: the interface of a profiling method, with its input (Task, MicroBatch) and its result (Measured)."""

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
    """The model to profile, and the settings.

    Attributes:
        chain: the layers of the model.
        loss_fn: the loss function; None if the recorded model computes its loss, or if there is no loss.
        device: the device to measure on.
        threads: number of intra-operation threads; None on an accelerator.
        devices: number of virtual devices that will share the CPU.
        seconds: time to spend on each micro-batch size.
        stop: set this event to end the running pass early.
    """

    chain: Chain
    loss_fn: Callable[..., Any] | None
    device: torch.device
    threads: int | None
    devices: int
    seconds: float
    stop: threading.Event

    @property
    def devices_at_once(self) -> int:
        """Number of CPU devices that can compute at once, limited by the number of cores; 1 on an accelerator."""
        cores = os.cpu_count() or 1
        return max(1, min(self.devices, cores // (self.threads or 1))) if self.device.type == "cpu" else 1

    @property
    def loss_module(self) -> nn.Module | None:
        """The loss function if it is a module, else None."""
        return self.loss_fn if isinstance(self.loss_fn, nn.Module) else None

    @property
    def everything(self) -> nn.Module:
        """A module list of the model and, if the loss function is a module, the loss function."""
        return nn.ModuleList([self.chain.model, *filter(None, [self.loss_module])])


class MicroBatch(NamedTuple):
    """The micro-batch to profile.

    Attributes:
        value: the input of the first layer.
        loss: function from the output of the last layer to a scalar tensor; None if there is no loss.
        counted_loss: ``loss`` on a new copy of the target. A step also copies the target to the device, so passes that
            count memory use this function.
        target_bytes: size of the target.
        samples: number of samples in the micro-batch.
        parts: number of micro-batches in the mini-batch.
    """

    value: Any
    loss: Loss
    counted_loss: Loss
    target_bytes: int
    samples: int
    parts: int


class Measured(NamedTuple):
    """Times and memory of all layers for one number of micro-batches.

    Attributes:
        part: the profiled micro-batch, which is the largest.
        times: times of each layer, then of the loss if there is one.
        memory: memory of the layers.
        repeats: number of times that each layer was timed, at least.
        scale: seconds of each micro-batch relative to their mean; empty if all have the same size.
    """

    part: MicroBatch
    times: list[LayerTimes]
    memory: Memory
    repeats: int
    scale: tuple[float, ...] = ()


class Method(ABC):
    """Interface of the methods that profile the layers of a chain.

    :class:`AllAtOnce` measures all layers together, :class:`OneAtATime` each layer alone, and :class:`Estimated`
    estimates times without running a kernel.
    """

    def __init__(self, task: Task) -> None:
        self.task = task

    @abstractmethod
    def running(self) -> AbstractContextManager[None]:
        """Return a context manager within which layers can run. The model is restored at its end."""

    def prepare(self, part: MicroBatches) -> tuple[Any, Any]:
        """Return copies of a micro-batch's input and target, in the form that the first layer and the loss expect."""
        batch = entered(self.task.chain, part)
        return fresh(batch.inputs[0]), fresh(batch.targets[0])

    @abstractmethod
    def measure(self, part: MicroBatch, done: Callable[[float], None]) -> Measured:
        """Return the times and the memory of each layer.

        Args:
            part: the micro-batch.
            done: called with the fraction of the work that is done, from 0 to 1.
        """


def micro_batch_of(method: Method, parts: MicroBatches, samples: int) -> MicroBatch:
    """Return the first micro-batch with ``samples`` samples, prepared by ``method``."""
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
