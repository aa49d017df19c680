"""`python -m benchmarks.emulated`: steps on emulated unlike devices, against what their plans predict."""

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import torch
import typer
from rich.console import Console
from rich.table import Table

import pipepart
from benchmarks.models import build
from benchmarks.quiet import undisturbed
from pipepart import Cluster, Pipeline, Plan
from schedules import Kind, Timeline, simulate

ROUNDS = 5
CLUSTERS = {
    "two alike": partial(Cluster.virtual, 2),
    "1 and 0.5": partial(Cluster.virtual, 2, speed=[1, 0.5]),
    "1 and 0.25": partial(Cluster.virtual, 2, speed=[1, 0.25]),
    "1 and 0.5, 100 MB/s": partial(Cluster.virtual, 2, speed=[1, 0.5], link="100MB/s", latency=1e-3),
}


def main(model: str = "gpt", micro_batches: int = 8, rounds: int = ROUNDS, schedule: str = "1f1b") -> None:
    """Plans for each cluster, trains along the plan, and shows both times; a profile is made for each anew.

    Where other programs disturb both, *played* tells what emulation itself is off by: the step that the order and the
    links make of the times that its own actions took.
    """
    table = Table(
        "devices", "cut", "predicted, ms", "measured, ms", "error", "played, ms", "error", "disturbed"
    )
    for name, cluster in CLUSTERS.items():
        table.add_row(name, *compared(model, cluster(threads=1), micro_batches, rounds, schedule))
    Console().print(table)


def compared(model: str, cluster: Cluster, micro_batches: int, rounds: int, schedule: str) -> list[str]:
    """One row: the plan's cut and step, and medians of measured steps."""
    work = build(model)
    torch.set_num_threads(1)
    predicted, measured, played, disturbed = [], [], [], 0
    cut = ""
    for _ in range(rounds):
        profile = pipepart.profile(
            work.model, work.sample, target=work.target, loss_fn=work.loss_fn, micro_batches=micro_batches
        )
        plan = pipepart.plan(profile, cluster, schedule=schedule, micro_batches=micro_batches)
        assert plan.prediction is not None
        predicted.append(plan.prediction.step_seconds * 1e3)
        cut = " + ".join(str(len(stage.layers)) for stage in plan.stages)
        with Pipeline(work.model, plan, work.loss_fn, trace=True) as pipe:
            step = partial(pipe.step, work.sample, target=work.target)
            step()
            taken = undisturbed(step)
            assert pipe.last_trace is not None
            played.append(from_its_actions(plan, pipe.last_trace) / pipe.last_trace.makespan)
        measured.append(taken.wall_seconds * 1e3)
        disturbed += taken.disturbed
    before, after, ratio = map(statistics.median, (predicted, measured, played))
    figures = [f"{before:.0f}", f"{after:.0f}", f"{before / after - 1:+.0%}", f"{ratio * after:.0f}"]
    return [cut, *figures, f"{ratio - 1:+.1%}", f"{disturbed} of {rounds}"]


def from_its_actions(plan: Plan, trace: Timeline) -> float:
    """Seconds of a step whose actions take what those of the trace took in the mean, on the plan's links."""
    taken: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for actions, starts, ends in zip(trace.schedule.actions, trace.starts, trace.ends, strict=True):
        for action, start, end in zip(actions, starts, ends, strict=True):
            taken[action.kind, action.stage].append(end - start)
    planned = plan.stage_costs()

    def means(kind: Kind, otherwise: Sequence[float]) -> list[float]:
        """Measured means by stage; the plan's seconds for a stage without such an action."""
        return [
            statistics.mean(taken[kind, stage]) if taken[kind, stage] else otherwise[stage]
            for stage in range(len(plan.stages))
        ]

    costs = dataclasses.replace(
        planned,
        forward=means(Kind.F, planned.forward),
        backward=means(Kind.B, planned.backward),
        backward_input=means(Kind.I, planned.backward_input),
        backward_weight=means(Kind.W, planned.backward_weight),
    )
    return simulate(trace.schedule, costs).makespan


if __name__ == "__main__":
    typer.run(main)
