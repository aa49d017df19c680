"""`python -m benchmarks.tracing`: times steps with tracing against the same steps without, in turns."""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import models, tables
from benchmarks.peers.pipepart_threads import DEVICES, profiled
from pipepart import Cluster, Pipeline, plan

COURSES = {"tiny": 64, "gpt": 8}
"""Models, and in how many micro-batches."""
STEPS = {"tiny": 5}
"""Steps to a sample, where one is short."""
Tracing = Callable[[Pipeline], AbstractContextManager[object]]
WAYS: dict[str, Tracing] = {
    "untraced": lambda pipe: nullcontext(),
    "traced": lambda pipe: pipe.trace(),
    "with memory": lambda pipe: pipe.trace(memory=True),
}


def main(
    rounds: Annotated[int, typer.Option(min=2, help="Samples of each.")] = 101,
    names: Annotated[str, typer.Option("--models", help="Which models.")] = ",".join(COURSES),
) -> None:
    """CPU time of all threads, on two virtual devices of one thread each, under 1F1B."""
    console = Console()
    console.print(tables.machine())
    table = Table("model", "micro-batches", "way", "CPU, ms a step", "over untraced", "quartiles", "wall, ms")
    for name in names.split(","):
        found = measure(name, COURSES.get(name, 4), rounds)
        before = [cpu for cpu, _ in found["untraced"]]
        for way, samples in found.items():
            ratios = [cpu / base for (cpu, _), base in zip(samples, before, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
            cpu, wall = (statistics.median(column) * 1e3 for column in zip(*samples, strict=True))
            spread = "" if way == "untraced" else f"{low:.3f} to {high:.3f}"
            over = "" if way == "untraced" else f"{middle:.3f}"
            table.add_row(name, str(COURSES.get(name, 4)), way, f"{cpu:.2f}", over, spread, f"{wall:.2f}")
    console.print(table)


def measure(name: str, micro_batches: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """CPU and wall seconds of a step of each way and round; the order turns from round to round."""
    workload = models.build(name)
    made = plan(
        profiled(workload, micro_batches),
        Cluster.virtual(DEVICES, threads=1),
        schedule="1f1b",
        stages=DEVICES,
    )
    samples: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    steps = STEPS.get(name, 1)
    with Pipeline(workload.model, made, loss_fn=workload.loss_fn) as pipe:
        for turn in range(-3, rounds):  # the first ones warm up
            ways = list(WAYS) if turn % 2 else list(WAYS)[::-1]
            for way in ways:
                with WAYS[way](pipe):
                    cpu, wall = time.process_time(), time.perf_counter()
                    for _ in range(steps):
                        pipe.zero_grad()
                        pipe.step(workload.sample, target=workload.target)
                    took = time.process_time() - cpu, time.perf_counter() - wall
                if turn >= 0:
                    samples[way].append((took[0] / steps, took[1] / steps))
    return samples


if __name__ == "__main__":
    typer.run(main)
