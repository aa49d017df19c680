"""Observed: the methods of a pipeline that report on its steps: traces and memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import schedules

from ..emulation import DeviceEmulation, MemoryUse, memory_of
from .trace import Trace, Traces


class Observed:
    """The traces and the memory of a pipeline. A subclass sets the two attributes."""

    _traces: Traces
    _emulation: DeviceEmulation | None

    @property
    def last_trace(self) -> schedules.Timeline | None:
        """Start and end of each action of the last step that was traced, in seconds; None before the first."""
        return self._traces.last

    @contextmanager
    def trace(self, *, memory: bool = False) -> Iterator[Trace]:
        """Record the steps that run within ``with pipe.trace() as trace``, to compare them with the plan.

        With ``memory``, also counts the bytes that each device keeps for its backwards (``peak_bytes`` of a step) and,
        on strict devices, all that it has (``trace.memory_bytes``). That slows small layers down.
        """
        counted = self._emulation.peaks() if memory and self._emulation else nullcontext({})
        with self._traces.opened(memory) as trace, counted as peaks:
            trace.memory_bytes = peaks
            yield trace

    def memory(self) -> dict[str, MemoryUse]:
        """Bytes in use and their peak on each virtual device, by device name, without the caller's own tensors.

        Under torchrun on the devices of this rank.

        Raises:
            RuntimeError: the pipeline was made without ``strict``, or its devices are real.
        """
        return memory_of(self._emulation)
