"""Pipelines on given torch devices, and their numbers on the CPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipepart import Cluster, Pipeline, Plan
from pipepart.capture import flatten
from tests.support import plain
from tests.support.chains import Offload, Recompute, plan_by_hand
from tests.vdev import devices as vdev
from tests.vdev import races

CHUNKS = {
    "gpipe": 1,
    "1f1b": 1,
    "eager-1f1b": 1,
    "zb-h1": 1,
    "zb-h2": 1,
    "interleaved-1f1b": 2,
    "interleaved-zb": 2,
    "zb-v": 2,
    "v-half": 2,
    "v-min": 2,
    "dualpipe-v": 2,
    "hanayo": 2,
}

TWO = ("vdev:0", "vdev:1")
SHARED = ("vdev:0", "vdev:0")  # one device of two workers
THREE = ("vdev:0", "vdev:1", "vdev:2")
AND_BACK = ("vdev:0", "vdev:1", "vdev:0")


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


def cut_on(
    devices: Sequence[str],
    model: nn.Module,
    borders: Sequence[int],
    loss_fn: Any = None,
    *,
    micro_batches: int = 4,
    schedule: str = "1f1b",
    chunks: int = 1,
    recompute: Recompute = "never",
    offload: Offload = "never",
    **options: Any,
) -> Pipeline:
    """Return a pipeline on these devices whose stages begin at layer 0 and at each of ``borders``."""
    names = [name for name, _ in flatten(model)]
    plan = plan_by_hand(
        names,
        borders,
        micro_batches=micro_batches,
        schedule=schedule,
        chunks=chunks,
        recompute=recompute,
        offload=offload,
    )
    return Pipeline(model, on_devices(plan, devices), loss_fn, **options)


@contextmanager
def late() -> Iterator[None]:
    """Let simulated devices run as late as they can, and fail if two accesses to memory have no order.

    The pipeline has to be made within ``hosts.tracked``, as the fixture ``late_devices`` does.
    """
    with races.refused(), vdev.delayed(lateness=1.0):
        yield


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the gradients of the parameters, on the CPU."""
    return {name: None if g is None else g.cpu() for name, g in plain.gradients(model).items()}


def state(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, on the CPU."""
    return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}


def sample(samples: int, width: int, out: int | None = None) -> tuple[Tensor, Tensor]:
    """Return an input and a target in float64, on the CPU."""
    x = torch.randn(samples, width, dtype=torch.double)
    return x, torch.randn(samples, out or width, dtype=torch.double)
