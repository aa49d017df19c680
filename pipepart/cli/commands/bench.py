"""``pipepart bench``: time a plain model and its pipeline on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import options
from ..errors import UsageError
from ..options import option


def bench_command(
    context: typer.Context,
    model: options.Model,
    plan: options.PlanOption = None,
    devices: options.Devices = None,
    cluster: options.Cluster = None,
    schedule: options.Schedule = "auto",
    micro_batches: options.MicroBatches = "auto",
    reduction: options.Reduction = None,
    layers: options.Layers = None,
    sample: options.Sample = None,
    steps: Annotated[
        int, option("N", "Steps to time of each kind, after two that warm up.", min=1, show_default=True)
    ] = 10,
    trace: Annotated[
        Path | None,
        option("FILE", "Save the median step of the pipeline, for explain, report and replan."),
    ] = None,
    as_json: options.AsJson = False,
    output: options.Output = None,
) -> None:
    """Time training steps of MODEL, plain on one device and as a pipeline.

    Without --plan the model is profiled and planned, for 2 devices if none are named. The steps run in turn, so that a
    busy machine slows both. Forward and backward are timed, without an optimizer. The plain model runs on one device
    like the pipeline's first: virtual devices share the cores of this machine, so that two of them on two cores stand
    against one core.
    """
    from ...planning import Plan, micro_batches_worth_trying
    from ...planning import plan as make_plan
    from ...reporting import bench_table, findings_report
    from ..devices import make_cluster
    from ..files import read
    from ..model import load, measure
    from ..output import check_writable, deliver, save, user_output_to_stderr
    from ..step_times import time_steps

    check_writable(trace, output)
    planned = ("devices", "cluster", "schedule", "micro_batches", "layers")
    if plan is not None and (fixed := options.set_by_user(context, *planned)):
        raise UsageError(f"{', '.join(fixed)}: the plan says that, leave it out or leave --plan out")
    if plan is not None:
        chosen = read(Plan, plan)
        loaded = load(model, sample)
    else:
        where = make_cluster(devices or (None if cluster else "2"), cluster)
        loaded = load(model, sample)
        profile = measure(
            loaded,
            lambda batch: (
                micro_batches_worth_trying(batch, len(where)) if micro_batches == "auto" else [micro_batches]
            ),
            layers=layers,
            threads=where.devices[0].threads,
            devices=len(where),
        )
        chosen = make_plan(
            profile,
            where,
            schedule=schedule or "auto",
            micro_batches=micro_batches,
            reduction=reduction,
            allow_split_ties=True,
        )
    with user_output_to_stderr():
        result, steps_of_pipeline = time_steps(loaded, chosen, steps, reduction=reduction)
    if trace is not None:
        save(steps_of_pipeline.save, trace)
    deliver(
        result,
        lambda: [bench_table(result), *findings_report(chosen, steps_of_pipeline)],
        as_json=as_json,
        path=output,
    )
