"""`python -m benchmarks.gpu`: pipelines on the GPUs of this machine; on one GPU, all stages share it."""

import json
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.devices import Accumulation, Piped, Sizes, gpt, plan_for, small
from benchmarks.overlap import profiled
from benchmarks.proof import TOLERANCE, require_equal
from benchmarks.rounds import Samples, interleave
from pipepart.units import format_bytes

WHOLE = Sizes(blocks=18, width=2048, heads=16, vocabulary=32768, sequence=1024, batch=32, micro_batches=16)
TINY = Sizes(blocks=6, width=16, heads=2, vocabulary=64, sequence=8, batch=8, micro_batches=4)
# Kernels that run beside others may sum in another order, and bfloat16 keeps 8 bits: a lost micro-batch is off by more.
TOLERANCE_BF16 = 2e-2


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each; the median is shown.")] = 9,
    stages: Annotated[str, typer.Option(help="Which numbers of stages.")] = "1,2,4,8",
    quick: Annotated[bool, typer.Option("--quick", help="1, 2 and 4 stages, 3 rounds.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write every figure here.")] = None,
    device: Annotated[str, typer.Option(hidden=True)] = "cuda",
    tiny: Annotated[bool, typer.Option("--tiny", hidden=True)] = False,
) -> None:
    """Throughput, overlap and memory of pipelines, against one device without a pipeline."""
    if device == "cuda" and not torch.cuda.is_available():
        print("benchmarks.gpu needs a CUDA device, and torch finds none here.")
        raise typer.Exit(1)
    if quick:
        rounds, stages = 3, "1,2,4"
    console = Console(width=120)
    console.print(machine(device))
    homes = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if device != "cuda":
        homes = [torch.device(device)]
        torch.set_num_threads(1)
    counts = [int(count) for count in stages.split(",")]
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(device),
        "gpt": race(console, homes, TINY if tiny else WHOLE, counts, rounds),
        "small": launches(console, homes, rounds, layers=4 if tiny else 32),
    }
    if json_file:
        json_file.write_text(json.dumps(report, indent=1))
        console.print(f"Every figure is in {json_file}.")


def race(
    console: Console, homes: list[torch.device], sizes: Sizes, counts: list[int], rounds: int
) -> dict[str, Any]:
    """Pipelines of a large model against gradient accumulation: proven equal, then timed, watched and weighed."""
    on_cuda = homes[0].type == "cuda"
    task = gpt(sizes, homes[0], torch.bfloat16 if on_cuda else torch.float32)
    parameters = sum(parameter.numel() for parameter in task.model.parameters())
    plain = Accumulation(task)
    pipes = [
        Piped(
            f"{count} stage{'s' * (count > 1)}",
            task,
            plan_for(task, [homes[index % len(homes)] for index in range(count)]),
        )
        for count in counts
    ]
    errors = _prove(plain, pipes, TOLERANCE_BF16 if on_cuda else TOLERANCE)
    memory = {pipe.name: (pipe.planned_bytes(), pipe.peak_bytes()) for pipe in pipes}
    predicted = {
        pipe.name: pipe.plan.predicted.step_seconds
        for pipe, count in zip(pipes, counts, strict=True)
        if count <= len(homes)
    }
    samples = interleave([plain, *pipes], rounds)
    found = {one.name: profiled(one.step, on_cuda) for one in (plain, *pipes)}
    table = Table(
        "",
        *("ms a step", "predicted", "throughput", "busy", "at once", "copies", "hidden", "plan", "peak"),
        title=f"GPT of {parameters / 1e6:.3g} M parameters, {sizes.micro_batches} micro-batches of "
        f"{sizes.batch // sizes.micro_batches} x {sizes.sequence} tokens",
        caption="predicted: ms, where each stage has a GPU to itself; throughput: over plain; busy, at once: time of a "
        "profiled step in which any stream computes, and of it several; copies, hidden: time in which any copies, and "
        "of it while one computes; plan, peak: bytes of the fullest device",
    )
    for name, taken in samples.items():
        seen = found[name]
        wall = taken.wall
        planned, peak = memory.get(name, ({}, {}))
        table.add_row(
            name,
            f"{wall * 1e3:.2f}",
            f"{predicted[name] * 1e3:.2f}" if name in predicted else "",
            f"{samples[plain.name].wall / wall:.3f}",
            f"{seen.busy / 1e3:.1f} ms",
            f"{seen.together / seen.busy:.0%}" if seen.busy else "",
            f"{seen.copying / 1e3:.1f} ms" if seen.copying else "",
            f"{seen.hidden / seen.copying:.0%}" if seen.copying else "",
            format_bytes(max(planned.values())) if planned else "",
            format_bytes(max(peak.values())) if peak else "",
        )
    console.print(table)
    for one in (plain, *pipes):
        one.close()
    return {
        "parameters": parameters,
        "gradient_errors": errors,
        "seconds": _seconds(samples),
        "predicted_seconds": predicted,
        "overlap": {name: asdict(seen) for name, seen in found.items()},
        "planned_and_peak_bytes": memory,
    }


def launches(console: Console, homes: list[torch.device], rounds: int, layers: int) -> dict[str, Any]:
    """A model whose layers take less time than their launches."""
    task = small(layers, width=256, micro_batches=8, device=homes[0])
    plan = plan_for(task, [homes[index % len(homes)] for index in range(2)])
    plain = Accumulation(task)
    pipes = [Piped("2 stages", task, plan)]
    errors = _prove(plain, pipes, TOLERANCE)
    samples = interleave([plain, *pipes], 10 * rounds)
    table = Table("", "ms a step", "throughput", title=f"{layers} x (Linear 256, GELU), 8 micro-batches of 8")
    for name, taken in samples.items():
        table.add_row(name, f"{taken.wall * 1e3:.3f}", f"{samples[plain.name].wall / taken.wall:.3f}")
    console.print(table)
    for one in (plain, *pipes):
        one.close()
    return {"gradient_errors": errors, "seconds": _seconds(samples)}


def machine(device: str) -> str:
    """Devices and versions, in one line."""
    if device == "cuda":
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        here = f"{len(names)} x {names[0]}, CUDA {torch.version.cuda}"
    else:
        here = f"a dry run on {device}, whose figures mean nothing"
    return f"{here}; Python {platform.python_version()}, torch {torch.__version__}"


def _prove(plain: Accumulation, pipes: list[Piped], tolerance: float) -> dict[str, float]:
    plain.step()
    expected = plain.gradients()
    errors = {}
    for pipe in pipes:
        pipe.step()
        errors[pipe.name] = require_equal(pipe.name, pipe.gradients(), expected, tolerance)
    return errors


def _seconds(samples: dict[str, Samples]) -> dict[str, list[float]]:
    return {name: taken.wall_seconds for name, taken in samples.items()}


if __name__ == "__main__":
    typer.run(main)
