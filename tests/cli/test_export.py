"""``pipepart export``: the files of other engines, printed or saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from pipepart import Cluster, Plan, Profile, plan

Run = Callable[[str], Result]


@pytest.fixture
def planned(measured: Profile, directory: Path) -> Plan:
    """Two stages under 1f1b in ``plan.json``."""
    made = plan(measured, Cluster.virtual(2), schedule="1f1b", micro_batches=4, cut_before=["2"])
    made.save(directory / "plan.json")
    return made


def test_the_files_are_printed(run: Run, planned: Plan) -> None:
    result = run("export plan.json --to torch-pipelining")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == str(planned.export("torch-pipelining"))


def test_the_files_are_saved_in_a_new_folder(run: Run, planned: Plan, directory: Path) -> None:
    result = run("export plan.json --to torch-pipelining -o out/deep")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "Saved in out/deep/torch_stages.py" in result.stderr
    saved = (directory / "out" / "deep" / "torch_stages.py").read_text()
    assert saved == planned.export("torch-pipelining").files["torch_stages.py"]
