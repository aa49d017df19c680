"""Makes the stages of one step, each with the micro-batches that it recomputes or offloads."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from torch.optim import Optimizer

from ..workers.modes import Modes
from .offload import CopyQueue, StageOffload, check_no_hooks
from .order import Order
from .replay.randomness import RngKeys
from .sinks import LossSink
from .stage import Stage
from .stage_run import StageRun
from .state.weight_versions import Versions

_NONE: Mapping[int, frozenset[int]] = {}


def stage_runs(
    order: Order,
    stages: Sequence[Stage],
    keys: RngKeys,
    modes: Modes,
    sink: LossSink,
    optimizers: Sequence[Optimizer | None],
    copy_queues: Sequence[CopyQueue],
    here: Container[int],
) -> dict[int, StageRun]:
    """Return the stages of a step, by number.

    Args:
        order: the actions.
        stages: of all replicas.
        keys, modes, sink: of the step.
        optimizers: of the stages of the model; empty if they have none. In one process they are the first replica's.
        copy_queues: of the workers, if any stage offloads.
        here: the workers of this process, whose stages they are.

    Raises:
        RuntimeError: a stage offloads, and the caller has hooks on saved tensors.
    """
    schedule = order.schedule
    repeated, offloaded = (order.repeated, order.offloaded) if modes.grad else (_NONE, _NONE)
    if any(offloaded.values()):
        check_no_hooks(modes)
    found = {}
    for stage in stages:
        number, offload = stage.index, None
        optimizer = optimizers[number % len(optimizers)] if optimizers and stage.replica is None else None
        if schedule.device_of[number] not in here:
            continue
        if parts := offloaded.get(number):
            queue = copy_queues[schedule.device_of[number]]
            modules = (layer for _, layer in stage.layers)
            offload = StageOffload(parts, queue, stage.device, modules)
        found[number] = StageRun(
            stage,
            keys,
            modes,
            sink,
            schedule.next_stage(number) is None,
            repeated.get(number, frozenset()),
            optimizer,
            Versions(schedule, number, optimizer) if schedule.versions else None,
            offload,
        )
    return found
