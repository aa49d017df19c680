"""Pipelines cut by hand at given layers, so that a test chooses every border."""

from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

import schedules
from pipepart import Cluster, Pipeline, Plan
from pipepart.capture import flatten
from pipepart.cluster import CompressedType, Compression, Link
from pipepart.planning import StagePlan

Recompute = Literal["never", "except-last", "always"]
Offload = Literal["never", "stash"]


def plan_by_hand(
    names: Sequence[str],
    borders: Sequence[int],
    *,
    micro_batches: int,
    schedule: str = "1f1b",
    chunks: int = 1,
    recompute: Recompute | tuple[Recompute, ...] = "never",
    offload: Offload | tuple[Offload, ...] = "never",
    replicas: int = 1,
    tensor: int = 1,
    compress: CompressedType | None = None,
) -> Plan:
    """A plan with a stage between each two borders, on virtual devices of one thread with ``chunks`` stages each.

    The devices of each replica follow those of the one before, and each is ``tensor`` devices. With ``compress``, all
    links compress messages.
    """
    edges = [0, *borders, len(names)]
    stages = len(edges) - 1
    devices = stages // chunks
    cluster = Cluster.virtual(devices * replicas * tensor, threads=1)
    if compress:
        link = Link(compress=Compression(dtype=compress, bytes_left=1))
        cluster = cluster.model_copy(update={"link": link})
    homes = schedules.build(schedule, devices, micro_batches, chunks).device_of[:stages]
    again = recompute if isinstance(recompute, tuple) else (recompute,) * stages
    out = offload if isinstance(offload, tuple) else (offload,) * stages
    return Plan(
        stages=tuple(
            StagePlan(
                layers=tuple(names[start:end]),
                device=cluster.devices[home * tensor].name,
                recompute=stage_recompute,
                offload=stage_offload,
            )
            for start, end, home, stage_recompute, stage_offload in zip(
                edges, edges[1:], homes, again, out, strict=False
            )
        ),
        cluster=cluster,
        schedule=schedule,
        micro_batches=micro_batches,
        chunks=chunks,
        replica_devices=tuple(
            tuple(cluster.devices[(replica * devices + home) * tensor].name for home in homes)
            for replica in range(1, replicas)
        ),
        tensor=tensor,
    )


def apart(plan: Plan) -> Plan:
    """Return the plan with each device a torch device of its own.

    Torch takes ``cpu:1`` for another device than ``cpu`` and copies what moves there: no accelerator is needed.
    """
    devices = tuple(
        device.model_copy(update={"torch_device": f"cpu:{index}"})
        for index, device in enumerate(plan.cluster.devices)
    )
    return plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"devices": devices})})


def on_device(plan: Plan, torch_device: str) -> Plan:
    """Return the plan with all stages on the given torch device."""
    devices = [
        device.model_copy(update={"torch_device": torch_device, "threads": None})
        for device in plan.cluster.devices
    ]
    cluster = plan.cluster.model_copy(update={"devices": tuple(devices)})
    return plan.model_copy(update={"cluster": cluster})


def cut_by_hand(
    model: nn.Module,
    borders: Sequence[int],
    *,
    loss_fn: Any = None,
    micro_batches: int = 3,
    schedule: str = "1f1b",
    chunks: int = 1,
    recompute: Recompute | tuple[Recompute, ...] = "never",
    offload: Offload | tuple[Offload, ...] = "never",
    replicas: int = 1,
    compress: CompressedType | None = None,
    trace: bool = False,
    reduction: Literal["mean", "sum", "batch"] | None = None,
    **options: Any,
) -> Pipeline:
    """Return a pipeline whose stages begin at layer 0 and at each of ``borders``; ``options`` are those of Pipeline."""
    names = [name for name, _ in flatten(model)]
    plan = plan_by_hand(
        names,
        borders,
        micro_batches=micro_batches,
        schedule=schedule,
        chunks=chunks,
        recompute=recompute,
        offload=offload,
        replicas=replicas,
        compress=compress,
    )
    return Pipeline(model, plan, loss_fn=loss_fn, reduction=reduction, trace=trace, **options)
