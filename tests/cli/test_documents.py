"""What ``--json`` prints: valid under the schema in the documentation, with a version, and what ``-o`` saves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from typer.testing import Result

from pipepart.cli.schemas import PRINTED, schema_text
from pipepart.document import FORMAT_VERSION

SIZES = "--devices 2 --micro-batches 4 --json"
# In order: later commands read what earlier ones have saved.
COMMANDS = {
    "profile": "profile models.py:whole --time-budget 0 --micro-batches 2,4 -o profile.json --json",
    "plan": "plan profile.json --devices 2 --schedule 1f1b --stages 2 -o plan.json --json",
    "plan-infeasible": "plan profile.json --devices 2 --memory 8300 --schedule gpipe --recompute never --json",
    "bench": "bench models.py:whole --plan plan.json --steps 2 --trace trace.json -o bench.json --json",
    "explain-trace": "explain plan.json --trace trace.json --json",
    "explain-difference": "explain plan.json other.json -o difference.json --json",
    "simulate": f"simulate --schedule zb-v -o step.json {SIZES}",
    "simulate-several": f"simulate --schedule 1f1b --schedule gpipe {SIZES}",
    "check": "check models.py:whole --plan plan.json --steps 1 -o check.json --json",
    "report": "report plan.json --json",
    "export": "export plan.json --to deepspeed --json",
    "cluster": "cluster --device 1GiB --device 2GiB@0.5 -o cluster.json --json",
}


def test_every_document_is_valid_under_its_schema_and_is_what_is_saved(
    run: Callable[[str], Result], directory: Path
) -> None:
    assert COMMANDS.keys() == PRINTED.keys()
    for name, line in COMMANDS.items():
        if name == "explain-difference":
            run("plan profile.json --devices 2 --schedule gpipe --stages 2 -o other.json")
        result = run(line)
        assert result.exit_code == (name == "plan-infeasible"), result.output
        document = json.loads(result.stdout)
        assert document["version"] == FORMAT_VERSION
        jsonschema.validate(document, json.loads(schema_text(name)))
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**document, "surprise": 1}, json.loads(schema_text(name)))
        PRINTED[name].model_validate_json(result.stdout)
        if (file := line.partition("-o ")[2].partition(" ")[0]) and name != "simulate":
            assert json.loads((directory / file).read_text()) == document


def test_the_page_names_every_schema() -> None:
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text("utf-8")
    assert [name for name in PRINTED if f"<_build/schemas/{name}.json>" not in page] == []
