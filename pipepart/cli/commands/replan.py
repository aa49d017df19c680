"""``pipepart replan``: plan again by a measured step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import options
from ..errors import UsageError
from ..options import option


def replan_command(
    context: typer.Context,
    plan: options.PlanFile,
    trace: Annotated[
        list[Path],
        option(
            "FILE",
            "A measured step of the plan, saved by `pipepart bench --trace` or pipe.trace(); repeatable.",
        ),
    ],
    profile: Annotated[
        Path | None,
        option(
            "FILE", "The profile to refine, with all its micro-batch sizes; if not given, that in the plan."
        ),
    ] = None,
    cluster: options.Cluster = None,
    schedule: options.Schedule = None,
    micro_batches: options.MicroBatches = None,
    recompute: options.Recompute = None,
    seconds: options.SearchSeconds = None,
    as_json: options.AsJson = False,
    output: options.Output = None,
) -> None:
    """Plan again with the times of a measured step; show what differs from the plan that was run.

    The costs of each stage's layers are scaled to what was measured. The request is that of the plan, but for the
    options given here. Both plans are predicted with the measured costs.
    """
    from ...cluster import Cluster
    from ...planning import Plan, refine
    from ...planning import replan as make_replan
    from ...profiling import Profile
    from ...reporting import difference_reports, findings_report, plan_summary, stage_table
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
    where = read(Cluster, cluster) if cluster else None
    asked = {name: context.params[name] for name in ("schedule", "micro_batches", "recompute", "seconds")}
    chosen = {name: value for name, value in asked.items() if value is not None}
    replanned = make_replan(ran, steps, measured, cluster=where, **chosen)
    before = ran
    if ran.profile is not None:
        before = ran.model_copy(update={"profile": refine(ran.profile, ran, steps)}).predict()
    deliver(
        replanned,
        lambda: [
            *difference_reports(before, replanned, (f"{plan.stem}, by the trace", "replanned")),
            *findings_report(replanned),
            plan_summary(replanned),
            stage_table(replanned),
        ],
        as_json=as_json,
        path=output,
    )
