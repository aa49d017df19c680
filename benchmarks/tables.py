"""Formats the two tables of the benchmark, with a description of the machine."""

import os
import platform
import statistics
from collections.abc import Iterable
from importlib.metadata import version

from rich.table import Table

from benchmarks.race import PLAIN, PLAIN_LOOP, Result


def machine() -> str:
    """Processor, cores and versions, in one line."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "torchgpipe", "pipepart"))
    return f"{processor()}, {os.cpu_count()} cores; Python {platform.python_version()}, {packages}"


def processor() -> str:
    """The processor's name as the kernel tells it, else its architecture."""
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def disturbances(result: Result) -> str:
    """How many of the timed steps shared the processor with other programs."""
    disturbed = sum(samples.disturbed for samples in result.samples.values())
    steps = sum(len(samples.steps) for samples in result.samples.values())
    return f"medians; {disturbed} of {steps} steps were disturbed by other programs"


def step_table(result: Result) -> Table:
    """Milliseconds of a step of each framework, and what pipepart predicted of its own."""
    stages = " + ".join(str(len(stage)) for stage in result.cut)
    table = Table(
        title=f"{result.model}, {result.micro_batches} micro-batches, {stages} layers",
        caption=f"{disturbances(result)}; auto: {result.auto}",
    )
    table.add_column("framework", no_wrap=True)
    for heading in ("ms", "of plain", "spread", "predicted", "error"):
        table.add_column(heading, justify="right")
    plain = result.samples[PLAIN].wall
    for name, samples in result.samples.items():
        predictions = result.predicted_seconds.get(name)
        predicted = statistics.median(predictions) if predictions else None
        table.add_row(
            name,
            f"{samples.wall * 1e3:.1f}",
            f"{samples.wall / plain:.2f}",
            f"±{_spread(samples.wall_seconds) * 1e2:.0f} %",
            "" if predicted is None else f"{predicted * 1e3:.1f}",
            "" if predicted is None else f"{(predicted / samples.wall - 1) * 1e2:+.1f} %",
        )
    return table


def overhead_table(result: Result) -> Table:
    """Microseconds of an action where the arithmetic costs next to nothing.

    A device runs two actions a micro-batch, its forward and its backward. Wall time is that of a step over
    the actions of one device; CPU time is that of all threads and processes over the actions of all devices.
    """
    of_a_device = 2 * result.micro_batches
    of_all = of_a_device * len(result.cut)
    loop = result.samples[PLAIN_LOOP]
    table = Table(title=f"Overhead: 4 x Linear(8, 8), {result.micro_batches} micro-batches, µs per action")
    table.add_column("framework", no_wrap=True)
    for heading in ("wall", "beyond plain", "CPU", "beyond plain"):
        table.add_column(heading, justify="right")
    for name, samples in result.samples.items():
        if name == PLAIN:
            continue
        table.add_row(
            name,
            f"{samples.wall / of_a_device * 1e6:.0f}",
            f"{(samples.wall - loop.wall) / of_a_device * 1e6:+.0f}",
            f"{samples.cpu / of_all * 1e6:.0f}",
            f"{(samples.cpu - loop.cpu) / of_all * 1e6:+.0f}",
        )
    return table


def _spread(values: Iterable[float]) -> float:
    """Half the interquartile range, relative to the median."""
    values = sorted(values)
    if len(values) < 2:
        return 0.0
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return (third - first) / 2 / median
