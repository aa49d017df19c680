"""Profiles a model and plans with the result, for ``Pipeline.auto``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from .capture import chain_of, holds_meta
from .cluster import Cluster, as_cluster
from .data.arguments import Arguments, check_arguments
from .data.split import Splitter, micro_batches_of
from .distributed import check_parallelize_given
from .input_error import InputTypeError
from .loss import declared_reduction
from .measure import profile
from .planning import Plan, PlanOptions, check_options, micro_batches_worth_trying, plan
from .planning.request import refuse_asynchronous
from .profiling import Parallelize
from .ranks import under_torchrun


def plan_for(
    model: nn.Module,
    sample: Any,
    *,
    target: Any,
    loss_fn: Callable[..., Any] | None,
    devices: int | Sequence[torch.device | str] | Cluster,
    optimizer_state: str,
    split: Splitter | None,
    layers: Sequence[str] | None,
    with_optimizers: bool,
    parallelize: Parallelize | None,
    all_devices: bool,
    **keywords: Any,
) -> Plan:
    """Profile a model and return a plan for it. The arguments are those of :meth:`pipepart.Pipeline.auto`.

    Args:
        with_optimizers: whether each stage will have an optimizer. Asynchronous schedules need one.
        parallelize: the function that ``tensor`` and ``shard`` of the plan need.
        all_devices: whether each device must have a stage, even if this does not shorten the step.
        keywords: further keywords of :func:`pipepart.plan`.

    Raises:
        TypeError, ValueError: as for :func:`pipepart.profile` and :func:`pipepart.plan`. Most arguments are checked
            before the layers are measured.
    """
    if not isinstance(optimizer_state, str):
        raise InputTypeError(
            f"optimizer_state must be the name of an optimizer, such as 'adam', got {optimizer_state!r:.80}"
        )
    cluster = as_cluster(devices)
    declared_reduction(loss_fn)
    options = PlanOptions(**keywords)
    check_options(options, cluster)
    check_parallelize_given(parallelize, options.tensor, options.shard, len(cluster), under_torchrun())
    if not with_optimizers:
        refuse_asynchronous(options.schedule)
    chain = chain_of(model, layers=layers)
    arguments = Arguments.of(sample)
    check_arguments(*chain.entrance, arguments, target)
    batch = sum(micro_batches_of(arguments.input, target, 1, split).sizes)
    # Micro-batches of at least two samples, as a BatchNorm needs.
    worth_trying = micro_batches_worth_trying(batch, len(cluster))
    layer_profile = profile(
        model,
        sample,
        loss_fn=loss_fn,
        target=target,
        layers=layers,
        micro_batches=worth_trying if options.micro_batches == "auto" else options.micro_batches,
        split=split,
        optimizer=optimizer_state,
        devices=len(cluster),
        threads=cluster.devices[0].threads,
        device=cluster.devices[0].torch_device if holds_meta(chain.model) else None,
    )
    make_plan = partial(plan, layer_profile, cluster, **{**keywords, "allow_split_ties": True})
    result = make_plan()
    stages = len(result.groups) // result.replicas
    if all_devices and result.unused_devices:
        result = make_plan(stages=stages)
    if all_devices and result.unused_devices:  # a searched plan may put several of these stages on one device
        result = make_plan(stages=stages, schedule="1f1b")
    return result
