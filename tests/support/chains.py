"""Pipelines cut by hand at given layers, so that a test chooses every border."""

from collections.abc import Sequence
from inspect import signature
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
    return on_device(plan, "cpu:{}")


def on_device(plan: Plan, torch_device: str) -> Plan:
    """Return the plan with all stages on the given torch device, in which ``{}`` is the number of the device."""
    on_cpu = torch_device.startswith("cpu")
    devices = tuple(
        device.model_copy(
            update={
                "torch_device": torch_device.format(index),
                "threads": device.threads if on_cpu else None,  # which bits depend on
            }
        )
        for index, device in enumerate(plan.cluster.devices)
    )
    return plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"devices": devices})})


def on_devices(plan: Plan, devices: Sequence[str]) -> Plan:
    """Return the plan on these devices instead of its own, in order; a device named twice is shared."""
    cluster = Cluster.of(devices)
    names = {old.name: new.name for old, new in zip(plan.cluster.devices, cluster.devices, strict=True)}
    return plan.model_copy(
        update={
            "cluster": cluster,
            "stages": tuple(s.model_copy(update={"device": names[s.device]}) for s in plan.stages),
            "replica_devices": tuple(tuple(names[name] for name in copy) for copy in plan.replica_devices),
        }
    )


def cut_by_hand(
    model: Any,
    borders: Sequence[int],
    *,
    loss_fn: Any = None,
    micro_batches: int = 3,
    devices: Sequence[str] | None = None,
    **how: Any,
) -> Pipeline:
    """Return a pipeline of a chain, recorded or not, whose stages begin at layer 0 and at each of ``borders``.

    ``devices`` of torch are used in place of virtual ones; ``how``: options of :func:`plan_by_hand` and of Pipeline.
    """
    layers = flatten(model) if isinstance(model, nn.Module) else model.layers
    of_plan = {name: how.pop(name) for name in signature(plan_by_hand).parameters if name in how}
    plan = plan_by_hand([name for name, _ in layers], borders, micro_batches=micro_batches, **of_plan)
    return Pipeline(model, on_devices(plan, devices) if devices else plan, loss_fn, **how)
