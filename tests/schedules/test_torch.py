"""Against torch.distributed.pipelining: never slower or larger than its schedules, and CSV that both sides read."""

from __future__ import annotations

import random
from pathlib import Path
from unittest import mock

import pytest

from schedules import Kind, Schedule, StageCosts, build, check, simulate

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
torch_stage = pytest.importorskip("torch.distributed.pipelining.stage")
visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")

OURS = {
    "gpipe": "GPipe",
    "interleaved-1f1b": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "interleaved-zb": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
CHUNKS = {"gpipe": [1], "zb-v": [2], "dualpipe-v": [2]}


def torch_schedule(name, p, m, chunks):
    """Torch's table, without its padding and its gradient reductions."""
    table = visualizer.get_schedule_ops(OURS[name], p, m, num_stages_per_rank=chunks)
    rows = [
        [str(action) for action in row if action is not None and "REDUCE" not in str(action)] for row in table
    ]
    return Schedule.from_csv("\n".join(",".join(row) for row in rows))


def random_costs(draw, stages, devices):
    def seconds():
        return [draw.uniform(0.1, 2.0) for _ in range(stages)]

    latency = [[draw.uniform(0, 0.5) for _ in range(devices)] for _ in range(devices)]
    return StageCosts(
        seconds(),
        seconds(),
        seconds(),
        latency=latency,
        stash_bytes=[draw.uniform(1, 3) for _ in range(stages)],
    )


def compare(name, p, m, chunks, draw):
    """Makespan and every peak of ours no larger than torch's, at random costs."""
    costs = random_costs(draw, p * chunks, p)
    theirs = simulate(torch_schedule(name, p, m, chunks), costs)
    ours = simulate(build(name, p, m, chunks=chunks), costs)
    assert ours.makespan <= theirs.makespan + 1e-9
    assert all(a <= b + 1e-9 for a, b in zip(ours.peak_bytes, theirs.peak_bytes, strict=True))


def supported(name, p, m):
    if name == "dualpipe-v":
        return m >= 2 * p
    if name == "gpipe" and not IS_NEW:
        return m >= p
    rounds = max(1, m // p)
    return not name.startswith("interleaved") or m % rounds == 0


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("p", [2, 3, *(pytest.param(p, marks=pytest.mark.slow) for p in (1, 4, 5, 8))])
def test_no_slower_and_no_larger_than_torch(name, p):
    draw, counts = random.Random(f"{name} {p}"), range(1, 4 * p + 2, max(1, p // 2))
    for m in (m for m in counts if supported(name, p, m)):
        for chunks in CHUNKS.get(name, [2, 3, 4]):
            compare(name, p, m, chunks, draw)


# Of torch after 2.9: schedules of several stages make their own messages, and a file keeps overlapped actions.
IS_NEW = issubclass(torch_schedules.ScheduleInterleaved1F1B, torch_schedules._PipelineScheduleRuntime)
new_torch = pytest.mark.skipif(not IS_NEW, reason="an older torch")

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


@new_torch
@pytest.mark.parametrize("name", TORCH)
def test_what_torch_writes_by_default_is_read(name: str, tmp_path: Path) -> None:
    theirs = lowered(name)
    theirs._dump_csv(str(tmp_path / "all.csv"))
    text = (tmp_path / "all.csv").read_text()
    assert all(kind in text for kind in ("UNSHARD", "RESHARD", "REDUCE_GRAD", "SEND_F", "RECV_B"))
    read = Schedule.from_csv(text)
    check(read)
    rows = [[str(a) for a in theirs.pipeline_order_with_comms[rank]] for rank in range(TORCH[name][0])]
    skipped = ("SHARD", "SEND", "RECV")
    kept = [[cell for cell in row if not any(word in cell for word in skipped)] for row in rows]
    assert [list(map(str, row)) for row in read.actions] == kept
    ranks, micro_batches, chunks = TORCH[name]
    assert (read.devices, read.micro_batches, read.stages) == (ranks, micro_batches, ranks * chunks)
    theirs._dump_csv(str(tmp_path / "compute.csv"), "compute_only")
    compute = Schedule.from_csv((tmp_path / "compute.csv").read_text())
    added = Kind.REDUCE_GRAD
    assert [[a for a in row if a.kind is not added] for row in read.actions] == list(
        map(list, compute.actions)
    )


@pytest.mark.parametrize(
    "name", ["1f1b", "zb-h1", "interleaved-1f1b", pytest.param("dualpipe-v", marks=new_torch), "hanayo"]
)
def test_torch_loads_what_is_written(name: str, tmp_path: Path) -> None:
    ours = build(name, 4, 8)
    (tmp_path / "ours.csv").write_text(ours.to_csv())
    theirs = runtime(4, 8, ours.stages // 4)
    theirs._load_csv(str(tmp_path / "ours.csv"))
    assert theirs.stage_index_to_group_rank == dict(enumerate(ours.device_of))
    theirs._dump_csv(str(tmp_path / "theirs.csv"))
    read = Schedule.from_csv((tmp_path / "theirs.csv").read_text())
    check(read)
    added = Kind.REDUCE_GRAD
    assert tuple(tuple(a for a in row if a.kind is not added) for row in read.actions) == ours.actions
