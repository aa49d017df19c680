"""`python -m benchmarks.cpu`: pipepart and its peers on two CPU devices of one thread each, in one run."""

import json
from contextlib import nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks import race, tables
from benchmarks.models import BUILDERS, RACED
from benchmarks.peers.distributed import Ranks
from benchmarks.quiet import TRIES

OVERHEAD_MICRO_BATCHES = 64


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each; the median is shown.")] = 7,
    models: Annotated[str, typer.Option(help="Which models, separated by commas.")] = ",".join(RACED),
    micro_batches: Annotated[str, typer.Option(help="Which numbers of micro-batches.")] = "4,8",
    tries: Annotated[int, typer.Option(min=1, help="Times to retake a step that others disturb.")] = TRIES,
    quick: Annotated[bool, typer.Option("--quick", help="Two models, 4 micro-batches, 3 rounds.")] = False,
    overhead: Annotated[bool, typer.Option(help="Also measure the overhead per action.")] = True,
    peers: Annotated[bool, typer.Option(help="Also race the peers, and pipepart on two ranks.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write every sample here.")] = None,
) -> None:
    """Race the plain model, pipepart, torchgpipe and torch.distributed.pipelining on this machine's CPU."""
    if quick:
        rounds, models, micro_batches = 3, "mlp16,convnet", "4"
    courses = [(name, count) for name in _names(models) for count in _counts(micro_batches)]
    results = []
    console = Console()
    console.print(tables.machine())
    # Every contender has one thread a device; what runs in this thread has this one.
    torch.set_num_threads(1)
    with Ranks() if peers else nullcontext() as ranks, console.status("") as status:

        def measure(name: str, count: int, repeats: int) -> race.Result:
            label = f"{name}, {count} micro-batches"
            return race.run(
                name,
                count,
                ranks,
                rounds=repeats,
                tries=tries,
                progress=lambda what: status.update(f"{label}: {what}"),
            )

        for name, count in courses:
            results.append(measure(name, count, rounds))
            console.print(tables.step_table(results[-1]))
        if overhead:
            # A step takes milliseconds here, so many more of them cost nothing.
            results.append(measure("tiny", OVERHEAD_MICRO_BATCHES, 10 * rounds))
            console.print(tables.overhead_table(results[-1]))
    if json_file:
        report = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": tables.machine(),
            "races": [asdict(result) for result in results],
        }
        json_file.write_text(json.dumps(report, indent=1))
        console.print(f"Every sample is in {json_file}.")


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in BUILDERS:
            raise typer.BadParameter(f"no model is called {name!r}; there are {', '.join(BUILDERS)}")
    return names


def _counts(text: str) -> list[int]:
    counts = [int(count) if count.isdecimal() else 0 for count in text.split(",")]
    if min(counts) < 1:
        raise typer.BadParameter(f"numbers of micro-batches are like '4,8', got {text!r}")
    return counts


if __name__ == "__main__":
    typer.run(main)
