"""``pipepart simulate --cluster``: stages that are described by numbers on the devices of a cluster's file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from pipepart import Cluster
from pipepart.planning.partition.reductions import all_reduce_seconds

Run = Callable[[str], Result]
STAGES = "--schedule 1f1b --cluster boxes.json"


@pytest.fixture
def boxes(directory: Path) -> Cluster:
    """Two hosts with two devices each in ``boxes.json``."""
    cluster = Cluster.parse(["1GiB"], hosts=2, devices_per_host=2, link=1e6, network=1e3)
    cluster.save(directory / "boxes.json")
    return cluster


def figures(result: Result) -> Any:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_replicas_share_the_micro_batches(run: Run, boxes: Cluster) -> None:
    found = figures(run(f"simulate {STAGES} --replicas 2 --micro-batches 8 --json"))
    assert found["makespan_seconds"] == pytest.approx((4 + 2 - 1) * 3)
    assert found["bubble"] == pytest.approx(1 / 5)
    assert [device["device"] for device in found["devices"]] == [f"device:{n}" for n in range(4)]


def test_one_replica_takes_all_devices_unless_told(run: Run, boxes: Cluster) -> None:
    whole = figures(run(f"simulate {STAGES} --micro-batches 4 --json"))
    part = figures(run(f"simulate {STAGES} --devices 2 --micro-batches 4 --json"))
    assert (whole["makespan_seconds"], part["makespan_seconds"]) == pytest.approx((7 * 3, 5 * 3))


def test_messages_and_gradients_take_the_links_of_the_cluster(run: Run, boxes: Cluster) -> None:
    sent = figures(run(f"simulate {STAGES} --devices 2 --micro-batches 1 --message 1MB --json"))
    assert sent["makespan_seconds"] == pytest.approx(6 + 2 * 1.0)  # both stages are in one host
    summed = figures(
        run(f"simulate {STAGES} --devices 1 --replicas 4 --micro-batches 4 --gradients 3KB --json")
    )
    names = [device.name for device in boxes.devices]
    assert summed["makespan_seconds"] == pytest.approx(3 + all_reduce_seconds(3000, names, boxes))


def test_chunks_are_those_of_the_schedule(run: Run, boxes: Cluster) -> None:
    command = (
        "simulate --cluster boxes.json --schedule interleaved-1f1b --devices 2 --chunks 2 --micro-batches 4"
    )
    found = figures(run(f"{command} --forward 1,2,1,1 --json"))
    assert [device["stages"] for device in found["devices"]] == [[0, 2], [1, 3]]
    assert sum(device["busy_seconds"] for device in found["devices"]) == pytest.approx(4 * (5 + 2 + 2))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_thousands_of_devices_are_simulated_within_a_minute(run: Run, directory: Path) -> None:
    gpus = {"name": "gpu", "kind": "H100", "memory_bytes": 80 * 2**30, "count": 8, "hosts": 512}
    network = [{"bandwidth": 4e11, "latency": 1e-5, "ports": 8}]
    (directory / "many.json").write_text(
        json.dumps({"devices": [gpus], "link": {"bandwidth": 3e11}, "network": network})
    )
    begin = time.process_time()
    found = figures(
        run(
            "simulate --cluster many.json --schedule 1f1b --devices 64 --replicas 64 --micro-batches 2048 "
            "--forward 0.1 --backward-input 0.1 --backward-weight 0.1 --message 64MiB --gradients 2GiB --json"
        )
    )
    assert time.process_time() - begin < 60
    assert len(found["devices"]) == 4096
    assert found["bubble"] == pytest.approx(63 / (32 + 63), rel=0.02)
