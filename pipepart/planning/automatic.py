"""From a model and a sample to a plan in one go: measures, and plans with what was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from ..capture import flatten
from ..cluster import Cluster, as_cluster
from ..data.arguments import Arguments, check_arguments
from ..data.split import Splitter, micro_batches_of
from ..loss import declared_reduction
from ..profiling import profile
from ..runtime import refuse_asynchronous
from . import Plan, check_choices, check_devices, micro_batches_worth_trying, plan


def plan_for(
    model: nn.Module,
    sample: Any,
    *,
    target: Any,
    loss_fn: Callable[..., Any] | None,
    devices: int | Sequence[torch.device | str] | Cluster,
    schedule: str,
    micro_batches: int | Literal["auto"],
    recompute: Literal["auto", "never", "except-last", "always"],
    replicas: int | Literal["auto"],
    optimizer: str,
    split: Splitter | None,
) -> Plan:
    """The best plan; the arguments are those of :meth:`pipepart.Pipeline.auto`.

    Raises:
        TypeError, ValueError: as :func:`pipepart.profile` and :func:`pipepart.plan` do; what is known beforehand to be
            impossible, before anything is measured.
    """
    cluster = as_cluster(devices)
    declared_reduction(loss_fn)
    check_choices(schedule, len(cluster), recompute=recompute, replicas=replicas)
    refuse_asynchronous(schedule)
    layers = flatten(model)
    if replicas == 1:
        check_devices(len(cluster), len(layers))
    given = Arguments.of(sample)
    check_arguments(*layers[0], given, target)
    batch = sum(micro_batches_of(given.input, target, 1, split).sizes)
    counts: int | Sequence[int] = (
        micro_batches if micro_batches != "auto" else micro_batches_worth_trying(batch, len(cluster))
    )
    measured = profile(
        model,
        sample,
        loss_fn=loss_fn,
        target=target,
        micro_batches=counts,
        split=split,
        optimizer=optimizer,
        devices=len(cluster),
        threads=cluster.devices[0].threads,
    )
    return plan(
        measured, cluster, schedule=schedule, recompute=recompute, replicas=replicas, allow_split_ties=True
    )
