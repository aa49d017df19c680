"""Reads the CSV files that torch.distributed.pipelining writes, and writes files that it reads."""

from __future__ import annotations

import csv
from pathlib import Path
from unittest import mock

import pytest

from schedules import Kind, Schedule, StageCosts, build, check, insert_messages, insert_reduce_grad, simulate

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
torch_stage = pytest.importorskip("torch.distributed.pipelining.stage")

# Torch's schedules of several stages a rank: ranks, micro-batches, stages of a rank.
TORCH = {
    "Interleaved1F1B": (4, 8, 2),
    "LoopedBFS": (3, 5, 2),
    "InterleavedZeroBubble": (4, 8, 3),
    "ZBVZeroBubble": (4, 6, 2),
    "DualPipeV": (2, 8, 2),
}


def runtime(ranks: int, micro_batches: int, chunks: int, name: str = "_PipelineScheduleRuntime"):
    stage = mock.create_autospec(torch_stage.PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, ranks, ranks * chunks, None
    return getattr(torch_schedules, name)([stage] * chunks, micro_batches)


def lowered(name: str):
    """A schedule of torch with its messages, gradient reductions and gathered weights."""
    made = runtime(*TORCH[name], name=f"Schedule{name}")
    made._prepare_schedule_with_comms(made.pipeline_order)
    return made


@pytest.mark.parametrize("name", TORCH)
def test_what_torch_writes_by_default_is_read(name: str, tmp_path: Path) -> None:
    theirs = lowered(name)
    theirs._dump_csv(str(tmp_path / "all.csv"))
    text = (tmp_path / "all.csv").read_text()
    assert all(kind in text for kind in ("UNSHARD", "RESHARD", "REDUCE_GRAD", "SEND_F", "RECV_B"))
    read = Schedule.from_csv(text)
    check(read)
    rows = [[str(a) for a in theirs.pipeline_order_with_comms[rank]] for rank in range(TORCH[name][0])]
    kept = [[cell for cell in row if "SHARD" not in cell] for row in rows]
    assert [list(map(str, row)) for row in read.actions] == kept
    ranks, micro_batches, chunks = TORCH[name]
    assert (read.devices, read.micro_batches, read.stages) == (ranks, micro_batches, ranks * chunks)
    ones = [1.0] * read.stages
    assert simulate(read, StageCosts(ones, ones, ones)).makespan >= 3 * micro_batches * chunks


@pytest.mark.parametrize("name", TORCH)
def test_computations_alone_are_read_with_their_empty_cells(name: str, tmp_path: Path) -> None:
    theirs = lowered(name)
    theirs._dump_csv(str(tmp_path / "compute.csv"), "compute_only")
    read = Schedule.from_csv((tmp_path / "compute.csv").read_text())
    with_messages = insert_reduce_grad(insert_messages(read))
    check(with_messages)
    theirs._dump_csv(str(tmp_path / "all.csv"))
    theirs_read = Schedule.from_csv((tmp_path / "all.csv").read_text())
    sent = {str(a) for row in theirs_read.actions for a in row if a.kind in (Kind.SEND_F, Kind.SEND_B)}
    assert sent == {
        str(a) for row in with_messages.actions for a in row if a.kind in (Kind.SEND_F, Kind.SEND_B)
    }


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b", "zb-v", "dualpipe-v", "hanayo"])
def test_torch_loads_what_is_written(name: str, tmp_path: Path) -> None:
    ours = build(name, 4, 8)
    (tmp_path / "ours.csv").write_text(ours.to_csv())
    theirs = runtime(4, 8, ours.stages // 4)
    theirs._load_csv(str(tmp_path / "ours.csv"))
    assert theirs.stage_index_to_group_rank == dict(enumerate(ours.device_of))
    theirs._dump_csv(str(tmp_path / "theirs.csv"))
    read = Schedule.from_csv((tmp_path / "theirs.csv").read_text())
    check(read)
    added = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B, Kind.REDUCE_GRAD)
    assert tuple(tuple(a for a in row if a.kind not in added) for row in read.actions) == ours.actions


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe-v"])
def test_torch_loads_messages_that_are_written(name: str, tmp_path: Path) -> None:
    ours = insert_reduce_grad(insert_messages(build(name, 4, 8)))
    (tmp_path / "ours.csv").write_text(ours.to_csv())
    theirs = runtime(4, 8, ours.stages // 4)
    theirs._load_csv(str(tmp_path / "ours.csv"), format="compute_comms")
    assert [list(map(str, theirs.pipeline_order_with_comms[rank])) for rank in range(4)] == list(
        csv.reader((tmp_path / "ours.csv").read_text().splitlines())
    )
