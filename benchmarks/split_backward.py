"""`python -m benchmarks.split_backward`: times split backwards (I and W) against full backwards (B)."""

import statistics
import time
from collections.abc import Iterator

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from benchmarks.models import SEQUENCE, WIDTH, Block
from pipepart.autograd import graph_cut
from pipepart.autograd.split_backward import backward_inputs
from pipepart.workers.process_settings import kept_memory

Roots = tuple[GradientEdge, ...]

ROUNDS = 31


def main(rounds: int = ROUNDS, quick: bool = False) -> None:
    """Thread CPU time of both, in turns, on one thread; --quick takes three turns."""
    torch.set_num_threads(1)
    with kept_memory:  # as in a pipeline's worker
        Console().print(compared(3 if quick else rounds))


def compared(rounds: int) -> Table:
    """A row for each block."""
    table = Table("block", "B, ms", "I, ms", "W, ms", "I + W over B", "quartiles")
    for name, model, sample in blocks():
        fused, first, second = measure(model, sample, rounds)
        ratios = [(i + w) / b for b, i, w in zip(fused, first, second, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        times = (f"{statistics.median(times) * 1e3:.2f}" for times in (fused, first, second))
        table.add_row(name, *times, f"{middle:.3f}", f"{low:.3f} to {high:.3f}")
    return table


def blocks() -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Stages as they come in pipelines, each with the input of a micro-batch."""
    torch.manual_seed(0)
    linear = nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(1024, 1024), nn.ReLU())))
    yield "linear 8, batch 64", linear, torch.randn(64, 1024)
    yield "linear 8, batch 32", linear, torch.randn(32, 1024)
    convolutions = [
        part
        for _ in range(4)
        for part in (nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    ]
    yield (
        "convolution 4",
        nn.Sequential(*convolutions),
        torch.randn(4, 64, 32, 32),
    )
    for count in (1, 4):
        attention = nn.Sequential(*(Block() for _ in range(count)))
        yield f"transformer {count}", attention, torch.randn(4, SEQUENCE, WIDTH)
    recurrent = nn.LSTM(256, 256, batch_first=True)
    yield "LSTM", recurrent, torch.randn(32, 32, 256)
    tiny = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    yield "tiny", tiny, torch.randn(8, 8)


def measure(model: nn.Module, sample: Tensor, rounds: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds of B, I and W of each round, gradients added to those that are there."""
    records: tuple[list[float], list[float], list[float]] = ([], [], [])
    for turn in range(-2, rounds):  # the first two warm up
        parts = (one_part, two_parts) if turn % 2 else (two_parts, one_part)
        found = {part: part(*graph(model, sample)) for part in parts}
        if turn >= 0:
            for record, seconds in zip(records, (*found[one_part], *found[two_parts]), strict=True):
                record.append(seconds)
    return records


def graph(model: nn.Module, sample: Tensor) -> tuple[Roots, graph_cut.Gradients]:
    """A fresh forward: where its backward starts, and with which gradients."""
    message, roots = graph_cut.cut(model(sample.clone().requires_grad_()))
    return roots, [torch.ones_like(leaf) for leaf in graph_cut.leaves(message)]


def one_part(roots: Roots, gradients: graph_cut.Gradients) -> tuple[float, ...]:
    """CPU seconds of B."""
    start = time.thread_time()
    graph_cut.backward(roots, gradients)
    return (time.thread_time() - start,)


def two_parts(roots: Roots, gradients: graph_cut.Gradients) -> tuple[float, ...]:
    """CPU seconds of I and of W."""
    start = time.thread_time()
    waiting = backward_inputs(roots, gradients)
    between = time.thread_time()
    waiting.accumulate()
    return between - start, time.thread_time() - between


if __name__ == "__main__":
    typer.run(main)
