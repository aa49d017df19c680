"""What ``--json`` prints is what ``-o`` saves, has a version, and is read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from typer.testing import Result

from pipepart import CheckReport, Cluster, Plan, Profile
from pipepart.cli.simulated import SimulatedSteps
from pipepart.reporting import BenchResult

# In order: later commands read what earlier ones have saved.
COMMANDS = {
    "profile models.py:whole --time-budget 0 --micro-batches 2,4 -o profile.json --json": Profile,
    "plan profile.json --devices 2 --schedule 1f1b --stages 2 -o plan.json --json": Plan,
    "bench models.py:whole --plan plan.json --steps 2 --trace trace.json -o bench.json --json": BenchResult,
    "replan plan.json --trace trace.json -o next.json --json": Plan,
    "simulate --schedule zb-v --schedule gpipe --devices 2 --micro-batches 4 -o step.json --json": SimulatedSteps,
    "check models.py:whole --plan plan.json --steps 1 -o check.json --json": CheckReport,
    "cluster --device 1GiB --device 2GiB@0.5 -o cluster.json --json": Cluster,
}


def test_every_document_is_what_is_saved_and_reads_back(
    run: Callable[[str], Result], directory: Path
) -> None:
    for line, kind in COMMANDS.items():
        result = run(line)
        assert result.exit_code == 0, result.output
        document = json.loads(result.stdout)
        assert document["version"] == 2
        file = directory / line.partition("-o ")[2].partition(" ")[0]
        assert json.loads(file.read_text()) == document
        kind.load(file)
