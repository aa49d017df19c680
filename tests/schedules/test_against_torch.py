"""At least as good as the schedules of torch.distributed.pipelining, at any numbers and costs."""

import random

import pytest

from schedules import Schedule, StageCosts, build, check, insert_messages, simulate

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
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


def compare(name, p, m, chunks, draw, times):
    """Makespan and every peak of ours no larger than torch's, at some random costs."""
    their_schedule, our_schedule = torch_schedule(name, p, m, chunks), build(name, p, m, chunks=chunks)
    for _ in range(times):
        costs = random_costs(draw, p * chunks, p)
        theirs, ours = simulate(their_schedule, costs), simulate(our_schedule, costs)
        assert ours.makespan <= theirs.makespan + 1e-9
        assert all(a <= b + 1e-9 for a, b in zip(ours.peak_bytes, theirs.peak_bytes, strict=True))


def supported(name, p, m):
    if name == "dualpipe-v":
        return m >= 2 * p
    rounds = max(1, m // p)
    return not name.startswith("interleaved") or m % rounds == 0


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 5), (4, 8), (4, 3), (4, 10), (8, 16)])
def test_no_slower_and_no_larger_than_torch(name, p, m):
    if not supported(name, p, m):
        pytest.skip(f"torch has no {name} for p={p}, m={m}")
    draw = random.Random(f"{name} {p} {m}")
    for chunks in CHUNKS.get(name, [2, 3]):
        compare(name, p, m, chunks, draw, times=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6, 8, 10])
def test_no_slower_and_no_larger_than_torch_over_a_sweep(name, p):
    draw = random.Random(f"{name} {p}")
    for m in range(1, 4 * p + 2, max(1, p // 2)):
        for chunks in CHUNKS.get(name, [2, 4]):
            if supported(name, p, m):
                compare(name, p, m, chunks, draw, times=1)


@pytest.mark.parametrize(
    "name", ["1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "zb-v", "v-half", "dualpipe-v", "hanayo"]
)
def test_torch_reads_the_csv_of_every_message_and_action(name):
    schedule = insert_messages(build(name, 4, 8))
    check(schedule)
    for row in schedule.to_csv().splitlines():
        for cell in row.split(","):
            assert str(torch_schedules._Action.from_str(cell)) == cell
