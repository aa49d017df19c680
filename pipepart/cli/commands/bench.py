"""``pipepart bench``: time a plain model and its pipeline on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import options
from ..errors import UsageError, with_exit_status
from ..options import option

if TYPE_CHECKING:
    from ...reporting import BenchResult
    from ..step_times import StepTimes

_PLANNED = ("devices", "cluster", "memory", "schedule", "micro_batches", "recompute", "layers", "time_budget")


@with_exit_status
def bench_command(
    context: typer.Context,
    model: options.Model,
    plan: Annotated[
        Path | None,
        option(
            "FILE", "Run this saved plan; without it the model is profiled and planned.", group="Pipeline"
        ),
    ] = None,
    devices: options.Devices = None,
    cluster: Annotated[
        Path | None,
        option("FILE", "The devices, as `pipepart cluster -o` saves them.", group="Devices"),
    ] = None,
    memory: Annotated[
        str | None, option("SIZE", "Memory limit of each device: 2GiB.", group="Devices")
    ] = None,
    schedule: Annotated[
        str,
        option(
            "NAME",
            f"auto for the best of several, search, or one of {options.SCHEDULE_LIST}.",
            group="Pipeline",
            words=options.REQUESTED_SCHEDULES,
            show_default=True,
        ),
    ] = "auto",
    micro_batches: Annotated[
        Any,
        option(
            "N",
            "Parts of a mini-batch; auto for the best number.",
            options.count_or_auto,
            group="Pipeline",
            show_default=True,
        ),
    ] = "auto",
    recompute: Annotated[
        Any,
        option(
            "MODE",
            "Activation checkpointing: auto, never, except-last or always.",
            group="Pipeline",
            words=("auto", *options.RECOMPUTE),
            show_default=True,
        ),
    ] = "auto",
    reduction: Annotated[
        Any,
        option(
            "HOW",
            "How the loss reduces over samples, if it does not say: mean, sum, or batch for any loss.",
            group="Pipeline",
            words=options.REDUCTIONS,
        ),
    ] = None,
    steps: Annotated[
        int,
        option(
            "N",
            "Steps to time of each kind, after two that warm up.",
            min=1,
            group="Timing",
            show_default=True,
        ),
    ] = 10,
    sample: options.Sample = None,
    dtype: options.Dtype = None,
    layers: options.Layers = None,
    time_budget: options.TimeBudget = 1.0,
    trace: Annotated[
        Path | None,
        option("FILE", "Save the median step of the pipeline, for explain, report and replan."),
    ] = None,
    as_json: options.AsJson = False,
    output: options.Output = None,
) -> None:
    """Time training steps of MODEL, plain on one device and as a pipeline.

    The steps run in turn, so that a busy machine slows both. Forward and backward are timed, without an optimizer.
    The plain model runs on one device like the pipeline's first: virtual devices share the cores of this machine, so
    that two of them on two cores stand against one core.
    """
    from ...data.arguments import Arguments
    from ...data.split import batch_size
    from ...planning import Plan, micro_batches_worth_trying
    from ...planning import plan as make_plan
    from ...reporting import bench_table, findings_report
    from ..default_loss import loss_or_mean_square
    from ..devices import make_cluster
    from ..files import read
    from ..model import load, measure_given
    from ..output import check_writable, deliver, save, user_output_to_stderr
    from ..step_times import time_steps

    check_writable(trace, output)
    if plan is not None and (fixed := options.given(context, *_PLANNED)):
        raise UsageError(f"{', '.join(fixed)}: the plan says that, leave it out or leave --plan out")
    made = read(Plan, plan) if plan else None
    where = None if made else make_cluster(devices or (None if cluster else "2"), cluster, memory=memory)
    with user_output_to_stderr():
        given = load(model, sample, dtype)
        loss_fn = loss_or_mean_square(given, layers)
        if made is None:
            assert where is not None
            count = len(where)
            profile = measure_given(
                replace(given, loss_fn=loss_fn),
                lambda batch: (
                    micro_batches_worth_trying(batch, count) if micro_batches == "auto" else [micro_batches]
                ),
                layers=layers,
                threads=where.devices[0].threads,
                seconds=time_budget,
                devices=count,
            )
            made = make_plan(
                profile,
                where,
                schedule=schedule,
                micro_batches=micro_batches,
                recompute=recompute,
                reduction=reduction,
                allow_split_ties=True,
            )
        times = time_steps(given, loss_fn, made, steps, reduction=reduction)
    found = _result(
        type(given.model).__name__, batch_size(Arguments.of(given.sample), given.target), steps, times
    )
    if trace is not None:
        save(times.trace.save, trace)
    deliver(
        found.model_dump_json(indent=1),
        lambda: [bench_table(found), *findings_report(made, times.trace)],
        as_json=as_json,
        path=output,
    )


def _result(model: str, samples: int, steps: int, times: StepTimes) -> BenchResult:
    from ...reporting import BenchResult

    plan = times.trace.plan
    predicted = plan.prediction

    def ratio(seconds: float | None, other: float | None) -> float | None:
        return seconds / other if seconds and other else None

    serial, step = (predicted.serial_seconds, predicted.step_seconds) if predicted else (None, None)
    return BenchResult(
        model=model,
        samples=samples,
        steps=steps,
        device=plan.workers[0].name,
        plain_seconds=times.plain,
        micro_batched_seconds=times.micro_batched,
        pipeline_seconds=times.pipeline,
        predicted_plain_seconds=serial,
        predicted_seconds=step,
        speed_up=ratio(times.plain, times.pipeline),
        micro_batched_speed_up=ratio(times.micro_batched, times.pipeline),
        predicted_speed_up=ratio(serial, step),
        plan=plan,
    )
