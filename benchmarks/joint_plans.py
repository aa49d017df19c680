"""`python -m benchmarks.joint_plans`: the step of searched plans against its lower bound, for tables of layers."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import pipepart
from benchmarks.layer_tables import PUBLISHED_STEP, drawn_rows, published, table_profile
from pipepart import Cluster, Profile
from pipepart.planning.costs.step_bound import step_bound

_MICRO_BATCHES = 8


def instances() -> list[tuple[str, Profile, int]]:
    """Return name, profile and number of devices: the published instance, and random ones of its kind."""
    found = [("published", published(_MICRO_BATCHES), devices) for devices in (4, 8, 16)]
    for layers, devices, head in (
        (30, 3, 1.0),
        (40, 4, 0.5),
        (72, 4, 1.0),
        (64, 2, 0.7),
        (56, 8, 0.3),
        (96, 8, 0.5),
    ):
        rows = drawn_rows(layers, seed=layers, head=head)
        found.append((f"{layers + 2} layers", table_profile(rows, _MICRO_BATCHES), devices))
    return found


def main(
    quick: Annotated[bool, typer.Option("--quick", help="The published instance on 4 devices only.")] = False,
) -> None:
    """Print the step that `plan` finds in 2 and in 10 seconds, and how far above the bound it is."""
    table = Table("layers", "devices", "seconds", "CPU seconds", "step", "above the bound", "stages")
    for name, profile, devices in instances()[: 1 if quick else None]:
        cluster = Cluster.parse(["80GiB"] * devices)
        bound = step_bound(profile.costs[0], [1.0] * devices)
        for seconds in (2.0, 10.0):
            start = time.process_time()
            plan = pipepart.plan(profile, cluster, micro_batches=_MICRO_BATCHES, seconds=seconds)
            used, step = time.process_time() - start, plan.predicted.step_seconds
            row = (f"{seconds:g}", f"{used:.1f}", f"{step:,.0f}", f"{step / bound - 1:.1%}")
            table.add_row(name, f"{devices}", *row, f"{len(plan.stages)}")
        if name == "published" and devices == 4:
            gap = PUBLISHED_STEP / bound - 1
            table.add_row(
                name, f"{devices}", "", "", f"{PUBLISHED_STEP:,}", f"{gap:.1%}", "24 (as published)"
            )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
