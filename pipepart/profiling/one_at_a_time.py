"""Measures the layers of a chain one after the other on a device that has no room for all.

::

    where the model is       layer 0     layer 1     layer 2   ...     its parameters and buffers stay there
                                │ copy      │ copy
    device                   measured ─▶ measured ─▶ ...               one layer's copies at a time, and
                                      output     output                the output that goes on
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
from .equal_layers import EqualLayers
from .layer_pass import LayerPass, fresh
from .memory import MemoryCount
from .method import Measured, Method, MicroBatch, Task
from .timing import PASSES, LayerTimer, LayerTimes
from .value_reads import ReadsRefused


class OneAtATime(Method):
    """Measures one layer after the other, on copies of its tensors on the device."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._on_meta = holds_meta(task.chain.model)

    def running(self) -> AbstractContextManager[None]:
        """Leave the model where it is."""
        return restored(self.task.everything, self.task.device)

    def prepare(self, part: MicroBatches) -> tuple[Any, Any]:
        """Return copies of input and target of a micro-batch on the device.

        Live values of a recorded model on the meta device have no values: those of the arguments take their places.
        """
        device = self.task.device
        taken = entered(self.task.chain, part)
        live = taken.inputs[0]
        if not isinstance(live, Live):
            return fresh(live, device), fresh(taken.targets[0], device)
        recording = live.recording
        call = Arguments.of_input(part.inputs[0])
        passed = [fresh(tensor, device) for tensor in tensors((call.args, call.kwargs))]
        values = dict(zip(recording.inputs, passed, strict=True))
        constants = {number: fresh(one, device) for number, one in recording.constants.items()}
        here = dataclasses.replace(recording, constants=constants)
        value = Live(here, tuple(values[number] for number in recording.parts[0].takes))
        if recording.loss is None:
            return value, fresh(taken.targets[0], device)
        return value, tuple(values[number] for number in recording.end_inputs)

    def measure(self, part: MicroBatch, done: Callable[[float], None]) -> Measured:
        """Measure each layer: its memory, then its times unless an equal layer has been timed before."""
        task, layers, value = self.task, self.task.chain.layers, part.value
        equal = EqualLayers(layers)
        count = MemoryCount(len(layers))
        times: list[LayerTimes] = []
        like: list[int] = []
        repeats: list[int] = []

        def timed(one: LayerPass) -> LayerTimes:
            timer = LayerTimer(one, task.device)
            timer.measure(value, budget=task.seconds / len(layers), passes=PASSES)
            repeats.append(timer.repeats)
            return timer.timings(part.parts)[0]

        for index, (name, layer) in enumerate(layers):
            one = LayerPass([(name, layer)], None, task.stop)
            with shadow_parameters(layer, task.device):
                with self._reads_refused(name):
                    count.add(layer, one, value, index)
                    output = one.output(value)
                first = equal.first_like(index, count.run_of(index)) if task.share else index
                like.append(first)
                times.append(timed(one) if first == index else times[first])
            value = output
            done((index + 1) / len(layers))
        if part.loss is not None:
            module = task.loss_module or nn.Module()
            one = LayerPass([], part.loss, task.stop)
            with shadow_parameters(module, task.device):
                with self._reads_refused("loss"):
                    count.add(module, LayerPass([], part.counted_loss, task.stop), value, len(layers))
                times.append(timed(one))
        return Measured(part, times, count.memory(), like, min(repeats))

    def _reads_refused(self, name: str) -> AbstractContextManager[Any]:
        return ReadsRefused(name) if self._on_meta else nullcontext()


def needs_copies(model: nn.Module, device: torch.device, device_given: bool) -> bool:
    """Return True if layers must be copied to a device to be measured there, one at a time."""
    return (device_given or holds_meta(model)) and any(one.device != device for one in state_of(model))
