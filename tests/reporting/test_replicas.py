"""Reports of plans with several copies of the model."""

from collections.abc import Callable

import pytest
from rich.console import RenderableType

from pipepart import Cluster, Plan
from pipepart.reporting import drawn_timeline, memory_table, plan_summary, stage_table

Printed = Callable[[RenderableType], str]


def rows(text: str) -> list[list[str]]:
    """The cells of the lines of a table that name a device."""
    return [line.split() for line in text.splitlines() if "device:" in line]


@pytest.fixture
def two_copies(two_stages: Plan) -> Plan:
    """The second half as fast as the first."""
    cluster = Cluster.parse(["64MiB", "64MiB", "64MiB@0.5", "64MiB@0.5"])
    stages = tuple(
        stage.model_copy(update={"device": f"device:{index}"})
        for index, stage in enumerate(two_stages.stages)
    )
    copies = (("device:2", "device:3"),)
    return two_stages.model_copy(
        update={"cluster": cluster, "stages": stages, "replica_devices": copies}
    ).refreshed()


def test_each_stage_of_each_copy_has_its_row(two_copies: Plan, printed: Printed) -> None:
    text = printed(stage_table(two_copies))
    assert [cells[:3] for cells in rows(text)] == [
        ["0", "0", "device:0"],
        ["1", "0", "device:1"],
        ["0", "1", "device:2"],
        ["1", "1", "device:3"],
    ]
    shares = [next(cell for cell in cells if cell.endswith("%")) for cells in rows(text)]
    slow = sorted(shares[2:], key=lambda share: int(share[:-1]))[-1]
    assert slow == "100%"
    assert [int(share[:-1]) for share in shares[:2]] == [round(int(share[:-1]) / 2) for share in shares[2:]]


def test_each_device_of_each_copy_is_in_the_table_of_memory(two_copies: Plan, printed: Printed) -> None:
    text = printed(memory_table(two_copies))
    assert [cells[:2] for cells in rows(text)] == [
        ["0", "device:0"],
        ["1", "device:1"],
        ["0", "device:2"],
        ["1", "device:3"],
    ]
    assert "only the first has optimizer state" in text


def test_a_device_of_two_directions_has_a_stage_of_each(two_stages: Plan, printed: Printed) -> None:
    both = two_stages.model_copy(update={"schedule": "chimera"}).refreshed()
    lines = [line.split() for line in printed(memory_table(both)).splitlines() if "virtual:" in line]
    assert [cells[:3] for cells in lines] == [["0,", "1", "virtual:0"], ["1,", "0", "virtual:1"]]


def test_the_summary_counts_the_copies(two_copies: Plan, two_stages: Plan, printed: Printed) -> None:
    assert "2 stages on 4 devices, 2 replicas" in printed(plan_summary(two_copies))
    assert "copies" not in printed(plan_summary(two_stages))


def test_the_timeline_explains_the_sum_of_gradients(
    two_copies: Plan, two_stages: Plan, printed: Printed
) -> None:
    what = "g: sum of the replicas' gradients"
    assert what in printed(drawn_timeline(two_copies.simulate()))
    assert what not in printed(drawn_timeline(two_stages.simulate()))
