"""``pipepart plan``: find the best cut and schedule of a model for given devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .. import options
from ..errors import UsageError, with_exit_status
from ..options import option

if TYPE_CHECKING:
    from ...planning import InfeasiblePlanError
    from ...profiling import Profile


@with_exit_status
def plan_command(
    context: typer.Context,
    model_or_profile: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_PROFILE",
            show_default=False,
            help="path/to/file.py:factory, or a saved profile as in profile.json.",
        ),
    ],
    devices: options.Devices = None,
    cluster: Annotated[Path | None, option("FILE", "A cluster saved as JSON.", group="Devices")] = None,
    device: Annotated[
        list[str] | None,
        option(
            "MEMORY[@SPEED]",
            "A device that is not at hand; repeatable. 24GiB, or 16GiB@0.6 if slower than the one profiled.",
            options.described,
            group="Devices",
        ),
    ] = None,
    bandwidth: Annotated[
        str | None,
        option("RATE", "Between devices given by --device: 12GB/s.", options.rate, group="Devices"),
    ] = None,
    host_link: Annotated[
        str | None,
        option(
            "RATE",
            "Between each device given by --device and the memory of its host: 25GB/s.",
            options.rate,
            group="Devices",
        ),
    ] = None,
    more_devices: Annotated[
        int | None, option("N", "Add N devices like the largest of these.", min=1, group="Devices")
    ] = None,
    memory: Annotated[
        str | None,
        option(
            "SIZE",
            "Memory limit of each device: 2GiB; in place of the one it has.",
            options.size,
        ),
    ] = None,
    schedule: Annotated[
        str,
        option(
            "NAME",
            "auto for the best of several, search for an order made for these stages, or one of "
            f"{options.SCHEDULE_LIST}.",
            show_default=True,
            words=options.REQUESTED_SCHEDULES,
        ),
    ] = "auto",
    micro_batches: Annotated[
        Any,
        option(
            "N",
            "Parts of a mini-batch; auto for the best number profiled.",
            options.count_or_auto,
            show_default=True,
        ),
    ] = "auto",
    stages: Annotated[
        Any,
        option(
            "N",
            "Number of stages, or auto for the best. Devices that gain nothing are left out.",
            options.count_or_auto,
            show_default=True,
        ),
    ] = "auto",
    chunks: Annotated[
        int | None,
        option(
            "N",
            "Stages per device, for a schedule that has several; 2 if not given, any number under auto.",
            min=1,
            group="Schedule",
        ),
    ] = None,
    replicas: Annotated[
        Any,
        option(
            "N",
            "Replicas of the model, each on devices of its own with a share of the micro-batches; or auto.",
            options.count_or_auto,
            show_default=True,
            group="Schedule",
        ),
    ] = "1",
    max_micro_batches: Annotated[
        int | None, option("N", "Upper limit for --micro-batches auto.", min=1, group="Schedule")
    ] = None,
    recompute: Annotated[
        Any,
        option(
            "MODE",
            "Activation checkpointing: auto for stages that would not fit; or never, except-last (all micro-batches "
            "but the last) or always, for all stages.",
            show_default=True,
            words=("auto", *options.RECOMPUTE),
        ),
    ] = "auto",
    offload: Annotated[
        Any,
        option(
            "MODE",
            "Keep what a stage saves for its backward on the host: auto for stages that would not fit, if the cluster "
            "says how fast its devices reach their host; stash for all stages; or never.",
            show_default=True,
            group="Schedule",
            words=("auto", "never", "stash"),
        ),
    ] = "auto",
    reduction: Annotated[
        Any,
        option(
            "NAME",
            "What the loss is over samples: mean, sum, or batch for any loss, on the outputs of all of them at once.",
            group="Schedule",
            words=options.REDUCTIONS,
        ),
    ] = None,
    compress: options.Compress = None,
    seconds: Annotated[
        float | None,
        option(
            "SECONDS",
            "Time to search for; 10 if not given, or part of a second for a small model.",
            min=0.01,
            group="Schedule",
        ),
    ] = None,
    pin: options.Pin = None,
    colocate: options.Colocate = None,
    no_cut_before: options.NoCutBefore = None,
    cut_before: options.CutBefore = None,
    allow_split_ties: Annotated[
        bool,
        typer.Option(
            "--allow-split-ties",
            help="Allow layers that share a parameter in different stages if no cut keeps them together.",
            rich_help_panel="Cut",
        ),
    ] = False,
    estimate_costs: Annotated[
        bool,
        typer.Option(
            "--estimate",
            help="Estimate the costs of --micro-batches from the numbers in the profile, if it has not that one.",
            rich_help_panel="Profiling",
        ),
    ] = False,
    sample: options.Sample = None,
    dtype: options.Dtype = None,
    layers: options.Layers = None,
    optimizer: options.Optimizer = "adam",
    threads: options.Threads = None,
    time_budget: options.TimeBudget = 1.0,
    measure_times: options.Measure = True,
    roofline: options.RooflineOf = None,
    as_json: options.AsJson = False,
    output: options.Output = None,
) -> None:
    """Cut a model into stages; predict step time and memory.

    MODEL_OR_PROFILE is a saved profile (a path that ends in .json), or a model as `pipepart profile` takes it, which
    is profiled first.
    """
    pins: dict[str, int] = {}
    for layer, stage in pin or ():
        if pins.setdefault(layer, stage) != stage:
            raise UsageError(f"layer {layer!r} is pinned to stage {pins[layer]} and to stage {stage}")
    wanted = options.compressed(compress or [])

    from ...planning import InfeasiblePlanError, micro_batches_worth_trying, plan
    from ...reporting import plan_reports
    from ..devices import make_cluster
    from ..files import read_roofline
    from ..model import measure
    from ..output import check_writable, deliver

    check_writable(output)
    if estimate_costs and micro_batches == "auto":
        raise UsageError("--estimate goes with --micro-batches N, the number to estimate for")
    where = make_cluster(devices, cluster, device or (), bandwidth, host_link, memory, more_devices)

    def sizes(batch: int) -> list[int]:
        if micro_batches != "auto":
            return [micro_batches]
        worth = micro_batches_worth_trying(batch, len(where))
        return sorted({min(each, max_micro_batches or each) for each in worth})

    if model_or_profile.endswith(".json"):
        profiling = (
            "sample",
            "dtype",
            "layers",
            "optimizer",
            "threads",
            "time_budget",
            "measure_times",
            "roofline",
        )
        if ignored := options.given(context, *profiling):
            raise UsageError(
                f"{', '.join(ignored)} cannot change {model_or_profile}, which is measured already"
            )
        profile = _saved(Path(model_or_profile), micro_batches, estimate_costs)
    else:
        profile = measure(
            model_or_profile,
            sample,
            sizes,
            dtype=dtype,
            layers=layers,
            optimizer=optimizer,
            threads=threads or where.devices[0].threads,
            seconds=time_budget,
            devices=len(where),
            measure=measure_times,
            roofline=read_roofline(roofline, measure_times),
        )
    try:
        made = plan(
            profile,
            where,
            schedule=schedule,
            micro_batches=micro_batches,
            recompute=recompute,
            offload=offload,
            reduction=reduction,
            compress=wanted,
            stages=stages,
            chunks=chunks,
            replicas=replicas,
            allow_split_ties=allow_split_ties,
            max_micro_batches=max_micro_batches,
            pin=pins or None,
            colocate=colocate or [],
            no_cut_before=no_cut_before or [],
            cut_before=cut_before or None,
            seconds=seconds,
        )
    except InfeasiblePlanError as error:
        if as_json:
            typer.echo(_infeasible(error))
        raise
    deliver(
        made.model_dump_json(indent=1), lambda: plan_reports(made, compact=True), as_json=as_json, path=output
    )


def _saved(path: Path, micro_batches: int | Literal["auto"], estimate_costs: bool) -> Profile:
    """Read a profile, and check that it has the costs at a number of micro-batches, or estimate them."""
    from ...planning import estimate
    from ...profiling import Profile
    from ..files import read

    profile = read(Profile, path)
    if micro_batches == "auto":
        return profile
    if estimate_costs:
        return estimate(profile, micro_batches)
    counts = [costs.micro_batches for costs in profile.costs]
    if micro_batches not in counts:
        raise UsageError(
            f"{path} was profiled with {', '.join(map(str, counts))} micro-batches, not with {micro_batches}: "
            f"add --estimate, or profile again with --micro-batches {micro_batches}"
        )
    return profile


def _infeasible(error: InfeasiblePlanError) -> str:
    """Return the reason and the suggestions as JSON."""
    from ..results import InfeasibleResult, Suggested

    found = InfeasibleResult(
        reason=str(error),
        stage=error.stage,
        deficit_bytes=error.deficit_bytes,
        suggestions=tuple(
            Suggested(
                change=one.change,
                command_line=one.command_line,
                options=dict(one.options),
                devices=tuple(device.name for device in one.devices),
                memory_limit=one.memory_bytes,
                estimated=one.estimated,
                step_seconds=one.step_seconds,
                memory_bytes=max(one.plan.predicted.memory_bytes),
            )
            for one in error.suggestions
        ),
    )
    return found.model_dump_json(indent=1)
