"""Methods of profiling that run all layers together: measured where they are, or estimated on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ..capture import shadow_parameters
from ..data.split import MicroBatches
from .analytic.meta_tensors import on_meta, to_meta
from .analytic.roofline import Roofline
from .analytic.times import estimate_times
from .background_load import background_load
from .equal_layers import EqualLayers
from .layer_pass import LayerPass
from .memory import Memory, MemoryCount
from .method import Measured, Method, MicroBatch, Task
from .timing import PASSES, LayerTimer

_ALONE = 0.3  # of the time, to measure without other devices
_FEW_PASSES = (3, PASSES[1])


class AllAtOnce(Method):
    """Measures the layers in passes over the whole chain, where the model is."""

    def running(self) -> AbstractContextManager[None]:
        """Run the model on copies of its parameters and buffers."""
        return shadow_parameters(self.task.everything)

    def measure(self, part: MicroBatch, done: Callable[[float], None]) -> Measured:
        """Count memory in passes over all layers, then time those that stand for others."""
        task = self.task
        memory, chain = _counted(task, part)
        done(0.5)
        others = task.devices_at_once - 1
        timer = LayerTimer(chain, task.device)
        if others:
            timer.measure(part.value, budget=task.seconds * _ALONE, passes=_FEW_PASSES)
        else:
            timer.measure(part.value, budget=task.seconds, passes=PASSES)
        times = timer.timings(part.parts)
        with background_load(task.chain.layers, part.value, others, task.threads) as loaded:
            if loaded:
                beside = LayerTimer(chain, task.device)
                beside.measure(part.value, budget=task.seconds * (1 - _ALONE), passes=PASSES)
                slower = beside.timings(part.parts)
                times = [alone.slower_by(other) for alone, other in zip(times, slower, strict=True)]
        done(1.0)
        return Measured(part, times, memory, chain.like, timer.repeats)


class Estimated(Method):
    """Counts bytes on the meta device and estimates times.

    Args:
        task: what is to be profiled.
        roofline: the device whose times are estimated.
    """

    def __init__(self, task: Task, roofline: Roofline) -> None:
        super().__init__(task)
        self._roofline = roofline

    def running(self) -> AbstractContextManager[None]:
        """Run the model on meta tensors."""
        return on_meta(self.task.everything, self._roofline.device)

    def prepare(self, part: MicroBatches) -> tuple[Any, Any]:
        """Return input and target of a micro-batch as meta tensors."""
        value, target = super().prepare(part)
        return to_meta(value), to_meta(target)

    def measure(self, part: MicroBatch, done: Callable[[float], None]) -> Measured:
        """Count memory in passes over all layers, then estimate the times of those that stand for others."""
        memory, chain = _counted(self.task, part)
        times = estimate_times(chain, part.value, part.parts, self._roofline)
        done(1.0)
        return Measured(part, times, memory, chain.like, repeats=0)


def _counted(task: Task, part: MicroBatch) -> tuple[Memory, LayerPass]:
    """Return the memory of all layers, and a chain in which one layer stands for those that are equal to it."""
    layers = task.chain.layers
    count = MemoryCount(len(layers))
    count.add(task.everything, LayerPass(layers, part.counted_loss, task.stop), part.value)
    memory = count.memory()
    if not task.share:
        return memory, LayerPass(layers, part.loss, task.stop)
    equal = EqualLayers(layers)
    like = [equal.first_like(index, run) for index, run in enumerate(memory.runs)]
    return memory, LayerPass(layers, part.loss, task.stop, like)
