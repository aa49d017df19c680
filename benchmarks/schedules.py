"""`python -m benchmarks.schedules`: how fast schedules are simulated and searched, and how good the search is."""

import random
import time
from collections.abc import Callable, Iterable

import typer
from rich.console import Console
from rich.table import Table

from schedules import StageCosts, bound, build, search, simulate

SEARCHES = ((4, 8), (8, 16), (8, 32), (16, 64), (64, 512))  # devices, micro-batches
SIMULATED = (10_000, 100_000, 1_000_000)  # actions


def main(quick: bool = False) -> None:
    """Time the simulator up to a million actions, and the search up to 64 devices; --quick stops before."""
    console = Console()
    console.print(simulations(SIMULATED[: 2 if quick else None]))
    console.print(searches(SEARCHES[: 3 if quick else None]))


def simulations(sizes: Iterable[int]) -> Table:
    """Seconds of one simulation; the last column stays level if they grow with the number of actions."""
    table = Table("schedule", "actions", "seconds", "µs per action", title="simulate")
    for name, kinds in (("1f1b", 2), ("zb-h1", 3)):
        for size in sizes:
            schedule = build(name, 8, size // (8 * kinds))
            costs = equal_costs(8)
            actions = sum(map(len, schedule.actions))
            seconds = best_of(3, lambda schedule=schedule, costs=costs: simulate(schedule, costs))
            table.add_row(name, f"{actions:,}", f"{seconds:.3f}", f"{seconds / actions * 1e6:.2f}")
    return table


def searches(sizes: Iterable[tuple[int, int]]) -> Table:
    """Seconds of one search of unequal stages, and its step against the best fixed ones and the bound."""
    table = Table(
        "devices", "micro-batches", "memory", "seconds", "step", "bound", "1f1b", "zb-h1", title="search"
    )
    for p, m in sizes:
        costs = unequal_costs(p, seed=p)
        for memory in (p, 3 * p // 2):
            started = time.perf_counter()
            found = search(costs, p, m, [memory] * p)
            seconds = time.perf_counter() - started
            steps = [
                simulate(schedule, costs).makespan
                for schedule in (found, build("1f1b", p, m), build("zb-h1", p, m))
            ]
            limit = bound(costs, p, m, [memory] * p)
            cells = f"{seconds:.2f}", *(f"{step:.2f}" for step in (steps[0], limit, *steps[1:]))
            table.add_row(str(p), str(m), str(memory), *cells)
    return table


def equal_costs(stages: int) -> StageCosts:
    """One second for each of F, I and W, with a little latency."""
    return StageCosts([1.0] * stages, [1.0] * stages, [1.0] * stages, latency=0.1, stash_bytes=[1.0] * stages)


def unequal_costs(stages: int, seed: int) -> StageCosts:
    """Stages of 0.7 to 1.3 times the mean, F : I : W as 1 : 1.1 : 0.8."""
    draw = random.Random(seed)
    scale = [draw.uniform(0.7, 1.3) for _ in range(stages)]
    return StageCosts(
        scale,
        [1.1 * s for s in scale],
        [0.8 * s for s in scale],
        latency=0.1,
        stash_bytes=[1.0] * stages,
    )


def best_of(times: int, run: Callable[[], object]) -> float:
    """Return the seconds of the fastest of some runs."""

    def once() -> float:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    return min(once() for _ in range(times))


if __name__ == "__main__":
    typer.run(main)
