"""Measures layers one at a time on copies of their tensors, for a model that may not fit the device.

::

    device of the model      layer 0     layer 1     layer 2   ...     all parameters and buffers
                                │ copy      │ copy
    device to measure on     measured ─▶ measured ─▶ ...               copies of one layer at a time, and
                                      output     output                the output of the layer before
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ..autograd.own_copy import tensors
from ..capture import Live, holds_meta, restored, shadow_parameters, state_of
from ..data.arguments import Arguments
from ..data.recorded import entered
from ..data.split import MicroBatches
from .analytic.meta_tensors import MovesToMeta
from .layer_pass import LayerPass, fresh
from .memory import MemoryCount
from .method import Measured, Method, MicroBatch, Task
from .timing import PASSES, LayerTimer, LayerTimes
from .value_reads import ReadsRefused


class OneAtATime(Method):
    """Copies the tensors of one layer at a time to the device and measures the layer there."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._on_meta = holds_meta(task.chain.model)

    def running(self) -> AbstractContextManager[None]:
        """Return a context manager that leaves the model on its device and restores its state at the end."""
        return restored(self.task.everything, self.task.device)

    def prepare(self, part: MicroBatches) -> tuple[Any, Any]:
        """Return copies of a micro-batch's input and target on the device.

        The live values of a recorded model on the meta device hold no data, so the model's arguments replace them.
        """
        device = self.task.device
        with MovesToMeta() if self._on_meta else nullcontext():  # parameters may be there, and buffers not
            batch = entered(self.task.chain, part)
        live, target = batch.inputs[0], fresh(batch.targets[0], device)
        if not isinstance(live, Live):
            return fresh(live, device), target
        recording = live.recording
        call = Arguments.of_input(part.inputs[0])
        arguments = [fresh(tensor, device) for tensor in tensors((call.args, call.kwargs))]
        values = dict(zip(recording.inputs, arguments, strict=True))
        constants = {number: fresh(tensor, device) for number, tensor in recording.constants.items()}
        on_device = dataclasses.replace(recording, constants=constants)
        value = Live(on_device, tuple(values[number] for number in recording.parts[0].takes))
        if recording.loss is not None:
            target = tuple(values[number] for number in recording.end_inputs)
        return value, target

    def measure(self, part: MicroBatch, done: Callable[[float], None]) -> Measured:
        """Measure the memory and the times of each layer."""
        task, layers, value = self.task, self.task.chain.layers, part.value
        count = MemoryCount(len(layers))
        times: list[LayerTimes] = []
        repeats: list[int] = []

        def timed(single: LayerPass) -> LayerTimes:
            timer = LayerTimer(single, task.device)
            timer.measure(value, budget=task.seconds / len(layers), passes=PASSES)
            repeats.append(timer.repeats)
            return timer.timings(part.parts)[0]

        for index, (name, layer) in enumerate(layers):
            single = LayerPass([(name, layer)], None, task.stop)
            with shadow_parameters(layer, task.device):
                with self._reads_refused(name):
                    count.add(layer, single, value, index)
                    output = single.output(value)
                times.append(timed(single))
            value = output
            done((index + 1) / len(layers))
        if part.loss is not None:
            module = task.loss_module or nn.Module()
            with shadow_parameters(module, task.device):
                with self._reads_refused("loss"):
                    count.add(module, LayerPass([], part.counted_loss, task.stop), value, len(layers))
                times.append(timed(LayerPass([], part.loss, task.stop)))
        return Measured(part, times, count.memory(), min(repeats))

    def _reads_refused(self, name: str) -> AbstractContextManager[Any]:
        return ReadsRefused(name) if self._on_meta else nullcontext()


def needs_copies(model: nn.Module, device: torch.device, device_given: bool) -> bool:
    """Return True if layers must be copied to ``device``, one at a time, to measure them."""
    return (device_given or holds_meta(model)) and any(tensor.device != device for tensor in state_of(model))
