"""Profiling methods that run all layers together: AllAtOnce measures on a device, Estimated uses the meta device."""

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
from .layer_pass import LayerPass
from .memory import Memory, MemoryCount
from .method import Measured, Method, MicroBatch, Task
from .timing import PASSES, LayerTimer

_ALONE_SHARE = 0.3  # share of the time to measure without background load


class AllAtOnce(Method):
    """Measures the layers in passes over the whole chain, on the device that the model is on."""

    def running(self) -> AbstractContextManager[None]:
        """Return a context manager that runs the model on copies of its parameters and buffers."""
        return shadow_parameters(self.task.everything)

    def measure(self, part: MicroBatch, done: Callable[[float], None]) -> Measured:
        """Count memory in passes over all layers, then time each layer."""
        task = self.task
        memory, chain = _counted(task, part)
        done(0.5)
        other_devices = task.devices_at_once - 1
        timer = LayerTimer(chain, task.device)
        share = _ALONE_SHARE if other_devices else 1.0
        timer.measure(part.value, budget=task.seconds * share, passes=PASSES)
        times = timer.timings(part.parts)
        with background_load(task.chain.layers, part.value, other_devices, task.threads) as loaded:
            if loaded:
                loaded_timer = LayerTimer(chain, task.device)
                loaded_timer.measure(part.value, budget=task.seconds * (1 - _ALONE_SHARE), passes=PASSES)
                loaded_times = loaded_timer.timings(part.parts)
                times = [alone.slower_by(beside) for alone, beside in zip(times, loaded_times, strict=True)]
        done(1.0)
        return Measured(part, times, memory, timer.repeats)


class Estimated(Method):
    """Counts bytes on the meta device and estimates times from a roofline.

    Args:
        task: the model to profile, and the settings.
        roofline: the speed of the device to estimate for.
    """

    def __init__(self, task: Task, roofline: Roofline) -> None:
        super().__init__(task)
        self._roofline = roofline

    def running(self) -> AbstractContextManager[None]:
        """Return a context manager that runs the model on meta tensors."""
        return on_meta(self.task.everything, self._roofline.device)

    def prepare(self, part: MicroBatches) -> tuple[Any, Any]:
        """Return the input and the target of a micro-batch as meta tensors."""
        value, target = super().prepare(part)
        return to_meta(value), to_meta(target)

    def measure(self, part: MicroBatch, done: Callable[[float], None]) -> Measured:
        """Count memory in passes over all layers, then estimate times."""
        memory, chain = _counted(self.task, part)
        times = estimate_times(chain, part.value, part.parts, self._roofline)
        done(1.0)
        return Measured(part, times, memory, repeats=0)


def _counted(task: Task, part: MicroBatch) -> tuple[Memory, LayerPass]:
    """Return the memory of all layers, and the chain of layers to time."""
    layers = task.chain.layers
    count = MemoryCount(len(layers))
    count.add(task.everything, LayerPass(layers, part.counted_loss, task.stop), part.value)
    return count.memory(), LayerPass(layers, part.loss, task.stop)
