"""``pipepart replan``: plan again by a measured step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .. import options
from ..errors import UsageError, with_exit_status
from ..options import option


@with_exit_status
def replan_command(
    plan: Annotated[
        Path,
        typer.Argument(metavar="PLAN", show_default=False, help="The saved plan that was run."),
    ],
    trace: Annotated[
        list[Path],
        option(
            "FILE",
            "A measured step of the plan, saved by `pipepart bench --trace` or pipe.trace(); repeatable.",
            show_default=False,
        ),
    ],
    profile: Annotated[
        Path | None,
        option(
            "FILE", "The profile to refine, with all its micro-batch sizes; if not given, that in the plan."
        ),
    ] = None,
    devices: options.Devices = None,
    cluster: Annotated[
        Path | None,
        option(
            "FILE", "Plan for these devices instead, as `pipepart cluster -o` saves them.", group="Devices"
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        option(
            "NAME",
            f"Another request than the plan's: auto, search, or one of {options.SCHEDULE_LIST}.",
            group="Schedule",
            words=options.REQUESTED_SCHEDULES,
        ),
    ] = None,
    micro_batches: Annotated[
        Any,
        option(
            "N",
            "Parts of a mini-batch, if another number was profiled.",
            options.count_or_auto,
            group="Schedule",
        ),
    ] = None,
    recompute: Annotated[
        Any,
        option(
            "MODE",
            "Activation checkpointing: auto, never, except-last or always.",
            group="Schedule",
            words=("auto", *options.RECOMPUTE),
        ),
    ] = None,
    seconds: Annotated[
        float | None, option("SECONDS", "Time to search for.", min=0.01, group="Schedule")
    ] = None,
    as_json: options.AsJson = False,
    output: options.Output = None,
) -> None:
    """Plan again with the times of a measured step; show what differs from the plan that was run.

    The costs of each stage's layers are scaled to what was measured. The request is that of the plan, but for the
    options given here. Both plans are predicted with the measured costs.
    """
    from ...planning import Plan, refine
    from ...planning import replan as make_replan
    from ...profiling import Profile
    from ...reporting import difference_reports, findings_report, plan_summary, stage_table
    from ..devices import make_cluster
    from ..files import read, read_step
    from ..output import check_writable, deliver

    check_writable(output)
    ran = read(Plan, plan)
    measured = read(Profile, profile) if profile else ran.profile
    if measured is None:
        raise UsageError(
            f"{plan} was written by hand and has no profile to refine: give it with --profile FILE"
        )
    steps = [read_step(path, ran, plan) for path in trace]
    where = make_cluster(devices, cluster) if devices or cluster else None
    asked = {
        "schedule": schedule,
        "micro_batches": micro_batches,
        "recompute": recompute,
        "seconds": seconds,
    }
    chosen = {name: value for name, value in asked.items() if value is not None}
    made = make_replan(ran, steps, measured, cluster=where, **chosen)
    before = ran
    if ran.profile is not None:
        before = ran.model_copy(update={"profile": refine(ran.profile, ran, steps)}).predict()
    deliver(
        made.model_dump_json(indent=1),
        lambda: [
            *difference_reports(before, made, (f"{plan.stem}, by the trace", "replanned")),
            *findings_report(made),
            plan_summary(made),
            stage_table(made),
        ],
        as_json=as_json,
        path=output,
    )
