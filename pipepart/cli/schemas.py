"""The JSON Schemas of what commands print with ``--json``; ``python -m pipepart.cli.schemas FOLDER`` writes them.

The documentation has them on its page ``json.md``; its build writes them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pydantic import BaseModel

from ..cluster import Cluster
from ..planning import Plan
from ..profiling import Profile
from ..reporting import BenchResult, PlanDifference
from ..verify import CheckReport
from ..whole_file import write_whole
from .results import (
    ExplainedTrace,
    ExportResult,
    InfeasibleResult,
    ReportResult,
    SimulatedStep,
    SimulatedSteps,
)

PRINTED: dict[str, type[BaseModel]] = {
    "profile": Profile,
    "plan": Plan,
    "plan-infeasible": InfeasibleResult,
    "explain-trace": ExplainedTrace,
    "explain-difference": PlanDifference,
    "simulate": SimulatedStep,
    "simulate-several": SimulatedSteps,
    "check": CheckReport,
    "bench": BenchResult,
    "report": ReportResult,
    "export": ExportResult,
    "cluster": Cluster,
}


def schema_text(name: str) -> str:
    """Return the JSON Schema of one of ``PRINTED``, with a line break at its end."""
    return (
        json.dumps(PRINTED[name].model_json_schema(mode="serialization"), indent=1, ensure_ascii=False) + "\n"
    )


def write_schemas(folder: Path) -> None:
    """Write a file for each of ``PRINTED`` into a folder, which is created if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PRINTED:
        write_whole(folder / f"{name}.json", schema_text(name))


if __name__ == "__main__":
    write_schemas(Path(sys.argv[1]))
