"""The report of a measured step of 32 stages and 256 micro-batches: made in seconds, small, soon interactive."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import schedules
from pipepart import Cluster, Plan, Trace, plan
from pipepart.cli.main import app
from tests.support.browser import OpenedPage
from tests.support.made_profiles import made_profile

_STAGES, _MICRO_BATCHES = 32, 256


def _large_plan() -> Plan:
    """A plan of 512 layers in 32 stages."""
    count = 16 * _STAGES
    names = [f"layers.{block}.{part}" for block in range(count // 2) for part in ("attention", "mlp")]
    profile = made_profile(
        names,
        batch=_MICRO_BATCHES,
        micro_batches=(_MICRO_BATCHES,),
        parameter_bytes=2**22,
        saved_bytes=2**20,
        output_bytes=2**18,
    )
    cluster = Cluster.parse(["80GiB"] * _STAGES, link="25GB/s")
    return plan(profile, cluster, schedule="1f1b", stages=_STAGES, micro_batches=_MICRO_BATCHES)


@pytest.mark.slow
@pytest.mark.alone
def test_a_large_report_is_made_and_opened_in_seconds(opened: Callable[..., OpenedPage], tmp_path: Path):
    large = _large_plan()
    costs = large.stage_costs()
    slower = replace(
        costs, forward=[seconds * (1 + stage % 7 / 20) for stage, seconds in enumerate(costs.forward)]
    )
    large.save(tmp_path / "plan.json")
    Trace(large, [schedules.simulate(large.build_schedule(), slower)]).save(tmp_path / "trace.json")
    files = [str(tmp_path / name) for name in ("plan.json", "trace.json", "report.html")]
    began = time.process_time()
    done = CliRunner().invoke(app, ["report", files[0], "--trace", files[1], "-o", files[2]])
    assert time.process_time() - began < 5
    assert done.exit_code == 0
    html = Path(files[2]).read_text(encoding="utf-8")
    assert len(html.encode()) < 3e6
    report = opened(html)
    opening = report.busy_seconds
    assert opening < 2
    assert report.page.locator("#timelines .row path").count() == 2 * 2 * _STAGES
    report.page.get_by_role("button", name="Zoom in").click()
    report.page.locator("#layers th button").first.click()
    assert report.busy_seconds - opening < 1
