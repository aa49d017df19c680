"""The three parts of an action (receive, compute, send), and wrappers of the computing part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from schedules import Kind

from .emulation import DeviceEmulation
from .stage_run import StageRun

Part = Callable[..., Any]
Parts = Mapping[Kind, tuple[Part, Part, Part]]
"""What each kind of action does: ``recv(step, run, k)``, ``compute(run, k, given)``, ``send(step, run, k, made)``."""


def on_version(kind: Kind, recv: Part, compute: Part, send: Part) -> tuple[Part, Part, Part]:
    """Wrap a part: it computes on the weight version of its micro-batch, if the schedule is asynchronous."""
    if kind in (Kind.OPT_STEP, Kind.REDUCE_GRAD):
        return recv, compute, send

    def on_version(run: StageRun, micro_batch: int, given: Any) -> Any:
        assert run.versions is not None
        with run.versions.used(micro_batch):
            return compute(run, micro_batch, given)

    return recv, on_version, send


def emulated(
    emulation: DeviceEmulation, kind: Kind, recv: Part, compute: Part, send: Part
) -> tuple[Part, Part, Part]:
    """Wrap a part: it computes on the stage's emulated device."""

    def computed(run: StageRun, micro_batch: int | None, given: Any) -> Any:
        with emulation.computing(kind, run.index):
            return compute(run, micro_batch, given)

    return recv, computed, send
