"""Measures or estimates the time and memory of the layers of a model on micro-batches.

Layers run together, or one at a time on copies of their tensors, for a model that may not fit the device::

    together          layer 0 ──▶ layer 1 ──▶ ... ──▶ loss      on the device of the model

    one at a time     layer 0     layer 1     layer 2   ...     all parameters and buffers stay where they are
                         │ copy      │ copy
                      measured ─▶ measured ─▶ ...               the device has the tensors of one layer at a time,
                               output     output                and the output of the layer before

Estimates run layers together on the meta device, where no kernel runs.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ..autograd.own_copy import own_copy, tensors
from ..capture import Chain, Live, holds_meta, loss_of, restored, shadow_parameters
from ..data.arguments import Arguments
from ..data.recorded import entered
from ..data.split import MicroBatches
from ..loss import sum_of
from .background_load import background_load
from .costs import Timing
from .estimate import estimate_times
from .layer_pass import LayerPass, Loss, fresh
from .memory import Memory, MemoryCount
from .meta_tensors import MovesToMeta, on_meta, to_meta
from .roofline import Roofline
from .timing import LayerTimer, LayerTimes


@dataclass(frozen=True)
class Task:
    """The model to profile, and the settings.

    Attributes:
        chain: the layers of the model.
        loss_fn: the loss function; None if the recorded model computes its loss, or if there is no loss.
        device: the device to measure on.
        one_at_a_time: whether layers are copied to the device one at a time.
        roofline: the speed of the device to estimate for; None to measure.
        threads: number of intra-operation threads; None on an accelerator.
        devices: number of virtual devices that will share the CPU.
        seconds: time to spend on each micro-batch size.
        stop: set this event to end the running pass early.
    """

    chain: Chain
    loss_fn: Callable[..., Any] | None
    device: torch.device
    one_at_a_time: bool
    roofline: Roofline | None
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
    def loss_module(self) -> nn.Module:
        """The loss function if it is a module, else a module without parameters."""
        return self.loss_fn if isinstance(self.loss_fn, nn.Module) else nn.Module()

    @property
    def everything(self) -> nn.Module:
        """A module list of the model and the loss function."""
        return nn.ModuleList([self.chain.model, self.loss_module])

    def running(self) -> AbstractContextManager[None]:
        """Return a context manager within which layers can run. The model is restored at its end."""
        if self.roofline is not None:
            return on_meta(self.everything, self.roofline.device)
        if self.one_at_a_time:
            return restored(self.everything, self.device)
        return shadow_parameters(self.everything)


class MicroBatch(NamedTuple):
    """The micro-batch to profile.

    Attributes:
        value: the input of the first layer.
        loss: function from the output of the last layer to a scalar tensor, on a new copy of the target, as a step
            copies the target to the device; None if there is no loss.
        target_bytes: size of the target.
        samples: number of samples in the micro-batch.
        parts: number of micro-batches in the mini-batch.
    """

    value: Any
    loss: Loss
    target_bytes: int
    samples: int
    parts: int


class Measured(NamedTuple):
    """Times and memory of all layers for one number of micro-batches.

    Attributes:
        part: the profiled micro-batch, which is the largest.
        times: times of each layer, then of the loss if there is one.
        memory: memory of the layers.
        repeats: number of times that each layer was timed, at least; 0 for estimates.
        scale: seconds of each micro-batch relative to their mean; empty if all have the same size.
    """

    part: MicroBatch
    times: list[LayerTimes]
    memory: Memory
    repeats: int
    scale: tuple[float, ...] = ()


def measure_sizes(task: Task, parts: MicroBatches, done: Callable[[float], None]) -> Measured:
    """Measure the micro-batches of one mini-batch: bytes of the largest, mean seconds of all.

    Eight micro-batches of 9 samples have sizes 2, 1, 1, ... With the seconds of the largest for each of them, the
    mini-batch would cost as much as 16 samples. So the largest and the smallest are measured, and seconds in between
    are interpolated.

    Args:
        task: the model to profile, and the settings.
        parts: the micro-batches of the mini-batch.
        done: called with the fraction of the work that is done, from 0 to 1.
    """
    smallest, largest = min(parts.sizes), max(parts.sizes)
    if smallest == largest:
        return _measure(task, _micro_batch(task, parts, largest), done)
    large = _measure(task, _micro_batch(task, parts, largest), lambda part: done(part / 2))
    small = _measure(task, _micro_batch(task, parts, smallest), lambda part: done((1 + part) / 2))
    shares = [(size - smallest) / (largest - smallest) for size in parts.sizes]
    mean_share = sum(shares) / len(shares)
    times = [_between(*pair, mean_share) for pair in zip(small.times, large.times, strict=True)]
    low, high, mean = (sum(time.seconds for time in layers) for layers in (small.times, large.times, times))
    scale = tuple((low + (high - low) * share) / mean for share in shares) if mean else ()
    return large._replace(times=times, repeats=min(large.repeats, small.repeats), scale=scale)


def _between(small: LayerTimes, large: LayerTimes, share: float) -> LayerTimes:
    """Interpolate linearly between the times of two micro-batches: ``small`` at share 0, ``large`` at share 1."""

    def number(low: float, high: float) -> float:
        return low + (high - low) * share

    def field(low: Any, high: Any) -> Any:
        if low is None or high is None:
            return None
        if isinstance(low, Timing):
            return Timing(seconds=number(low.seconds, high.seconds), spread=number(low.spread, high.spread))
        return number(low, high)

    return LayerTimes(*map(field, small, large))


def _micro_batch(task: Task, parts: MicroBatches, samples: int) -> MicroBatch:
    """Return copies of the first micro-batch with ``samples`` samples, as the first layer and the loss expect it."""
    index = parts.sizes.index(samples)
    part = parts._replace(inputs=[parts.inputs[index]], targets=[parts.targets[index]], sizes=[samples])
    value, target = _on_device(task, part) if task.one_at_a_time else _entered(task, part)
    if task.roofline is not None:
        value, target = to_meta(value), to_meta(target)
    loss_fn = task.loss_fn
    if loss_fn is None and not (isinstance(value, Live) and value.recording.loss is not None):
        return MicroBatch(value, None, 0, samples, len(parts.sizes))
    loss_fn = loss_fn or loss_of
    targets = () if target is None else (target,)

    def loss(output: Any) -> torch.Tensor:
        return sum_of(loss_fn(output, *own_copy(targets)))

    size = sum(tensor.nbytes for tensor in tensors(targets))
    return MicroBatch(value, loss, size, samples, len(parts.sizes))


def _entered(task: Task, part: MicroBatches) -> tuple[Any, Any]:
    """Return copies of a micro-batch's input and target where they are."""
    batch = entered(task.chain, part)
    return fresh(batch.inputs[0]), fresh(batch.targets[0])


def _on_device(task: Task, part: MicroBatches) -> tuple[Any, Any]:
    """Return copies of a micro-batch's input and target on the device to measure on.

    The live values of a recorded model on the meta device hold no data, so the model's arguments replace them.
    """
    device = task.device
    # Parameters may be on the meta device, and buffers not.
    with MovesToMeta() if holds_meta(task.chain.model) else nullcontext():
        live, target = _entered(task, part)
    if not isinstance(live, Live):
        return fresh(live, device), fresh(target, device)
    recording = live.recording
    call = Arguments.of_input(part.inputs[0])
    arguments = [fresh(tensor, device) for tensor in tensors((call.args, call.kwargs))]
    values = dict(zip(recording.inputs, arguments, strict=True))
    constants = {number: fresh(tensor, device) for number, tensor in recording.constants.items()}
    on_device = dataclasses.replace(recording, constants=constants)
    value = Live(on_device, tuple(values[number] for number in recording.parts[0].takes))
    if recording.loss is None:
        return value, fresh(target, device)
    return value, tuple(values[number] for number in recording.end_inputs)


class _Section(NamedTuple):
    """Layers that run in one pass: the module with their parameters, index of the first, and the pass over them."""

    module: nn.Module
    first: int
    chain: LayerPass


def _sections(task: Task, part: MicroBatch) -> list[_Section]:
    """Return the sections to measure: the whole chain with its loss, or each layer and then the loss."""
    layers, stop = task.chain.layers, task.stop
    if not task.one_at_a_time:
        return [_Section(task.everything, 0, LayerPass(layers, part.loss, stop))]
    sections = [
        _Section(layer[1], index, LayerPass([layer], None, stop)) for index, layer in enumerate(layers)
    ]
    if part.loss is not None:
        sections.append(_Section(task.loss_module, len(layers), LayerPass([], part.loss, stop)))
    return sections


def _measure(task: Task, part: MicroBatch, done: Callable[[float], None]) -> Measured:
    """Count the memory of each layer, then measure or estimate its times."""
    sections = _sections(task, part)
    count = MemoryCount(len(task.chain.layers))
    times: list[LayerTimes] = []
    repeats: list[int] = []
    value = part.value
    for number, section in enumerate(sections, start=1):
        with shadow_parameters(section.module, task.device) if task.one_at_a_time else nullcontext():
            count.add(section.module, section.chain, value, section.first)
            section_times, repeated = _times(task, section.chain, value, part.parts)
            if task.one_at_a_time:
                value = section.chain.output(value)
        times += section_times
        repeats.append(repeated)
        done(number / len(sections))
    return Measured(part, times, count.memory(), min(repeats))


def _times(task: Task, chain: LayerPass, value: Any, micro_batches: int) -> tuple[list[LayerTimes], int]:
    """Return the times of the layers of ``chain``, and how often each was timed."""
    if task.roofline is not None:
        return estimate_times(chain, value, micro_batches, task.roofline), 0
    if task.one_at_a_time:
        timer = LayerTimer(chain, task.device)
        timer.measure(value, task.seconds / len(task.chain.layers))
    else:
        others = task.devices_at_once - 1
        with background_load(task.chain.layers, value, others, task.threads) as load:
            timer = LayerTimer(chain, task.device, load)
            timer.measure(value, task.seconds)
    return timer.timings(micro_batches), timer.repeats
