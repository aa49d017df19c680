"""The figures of the report: memory over time, idle time by cause, columns of timelines."""

from __future__ import annotations

import numpy as np
import pytest

from pipepart import Cluster, Plan, Profile, plan
from pipepart.planning.plans.memory_over_time import memory_over_time
from pipepart.reporting.report.idle import causes_of, phases_of
from pipepart.reporting.report.timeline_columns import timeline_columns
from schedules import StageCosts, Timeline, build, simulate
from schedules.core.dependencies import CODE

PLANS = {
    "1f1b": {"cluster": Cluster.virtual(2)},
    "gpipe": {"cluster": Cluster.virtual(2), "recompute": "always"},
    "zb-h1": {"cluster": Cluster.virtual(2)},
    "interleaved-1f1b": {"cluster": Cluster.virtual(2), "chunks": 2},
    "zb-v": {"cluster": Cluster.virtual(2)},
    "pipedream": {"cluster": Cluster.virtual(2)},
}


@pytest.mark.parametrize("schedule", PLANS)
def test_the_memory_over_time_has_the_predicted_peak(doubled: Profile, schedule: str):
    check_peaks(plan(doubled, schedule=schedule, micro_batches=4, **PLANS[schedule]))


def test_the_memory_over_time_counts_replicas_and_offloaded_stashes(doubled: Profile):
    check_peaks(plan(doubled, Cluster.virtual(4), schedule="1f1b", micro_batches=4, replicas=2))
    host = Cluster.parse(["64MiB"] * 2, host_link="25GB/s")
    check_peaks(plan(doubled, host, schedule="1f1b", micro_batches=4, offload="stash"))


def check_peaks(made: Plan) -> None:
    timeline = made.simulate()
    found = memory_over_time(made, timeline)
    needs = made.device_bytes(timeline)
    assert [each.total.max() for each in found] == [needs[device.name] for device in made.workers]
    for row, each in enumerate(found):
        assert each.at[0] == 0
        assert (np.diff(each.at) >= 0).all()
        assert each.at[1:-1].tolist() == list(timeline.starts[row])
        assert each.at[-1] == timeline.ends[row][-1]
        assert each.bytes["stashes"][0] == each.bytes["stashes"][-1] == 0
        assert all((values >= 0).all() for name, values in each.bytes.items() if name != "gradients")


def test_idle_time_is_split_whole_by_phase_and_by_cause():
    timeline = uneven_step()
    for parts in (phases_of(timeline), causes_of(timeline)):
        sums = np.sum([part.seconds for part in parts], axis=0)
        assert sums == pytest.approx([idle.total for idle in timeline.idle])


def test_the_straggler_is_what_others_wait_for():
    """Stage 1 takes twice as long: the other devices wait for it as long as it computes longer than they do."""
    timeline = uneven_step()
    straggler = next(part for part in causes_of(timeline) if part.word == "waits for the straggler")
    busy = timeline.busy
    assert busy == (24, 48, 24)
    assert straggler.seconds[1] == 0
    assert straggler.seconds[0] == min(timeline.idle[0].producer, 24)
    assert sum(straggler.seconds) > 0


def uneven_step() -> Timeline:
    costs = StageCosts([1, 2, 1], [1, 2, 1], [1, 2, 1], latency=0.25)
    return simulate(build("1f1b", devices=3, micro_batches=8), costs)


def test_the_columns_of_a_timeline_tell_what_each_action_takes(doubled: Profile):
    cluster = Cluster.parse(["64MiB", "64MiB"], link="1MB/s")
    made = plan(doubled, cluster, schedule="1f1b", stages=2, micro_batches=4)
    timeline = made.simulate()
    columns = timeline_columns(timeline, made, timeline.makespan)
    found = columns.columns
    tick = timeline.makespan / (2**32 - 1)
    assert found["start"] * tick == pytest.approx(np.concatenate(timeline.starts), abs=tick)
    assert found["end"] * tick == pytest.approx(np.concatenate(timeline.ends), abs=tick)
    names = [
        f"{stage}{tuple(CODE)[code].value}{part}"
        for code, stage, part in zip(found["code"], found["stage"], found["micro_batch"], strict=True)
    ]
    assert names == [str(action) for row in timeline.schedule.actions for action in row]
    sent = {
        (names[source], names[target]): (arrived * tick, columns.sizes[size])
        for source, target, arrived, size in zip(
            *(found[name] for name in ("source", "target", "arrived", "size")), strict=True
        )
    }
    assert len(sent) == len(timeline.transfers) == 8
    for each in timeline.transfers:
        letter = each.kind.value
        arrived, size = sent[
            f"{each.source}{letter}{each.micro_batch}", f"{each.target}{letter}{each.micro_batch}"
        ]
        assert arrived == pytest.approx(each.end, abs=tick)
        assert size == each.bytes
