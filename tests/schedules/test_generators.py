"""Each generator's step time and memory against the closed forms of its paper."""

import itertools
import random

import pytest

from schedules import StageCosts, build, simulate


def equal(schedule, forward=1.0, inputs=1.0, weights=1.0, **more):
    """Costs of F, I and W per device; a chunk costs its share."""
    chunks = schedule.model_stages // schedule.devices
    stages = schedule.model_stages
    return StageCosts(
        [forward / chunks] * stages, [inputs / chunks] * stages, [weights / chunks] * stages,
        stash_bytes=[1 / chunks] * stages, **more,
    )  # fmt: skip


def timeline(name, p, m, costs=(1.0, 1.0, 1.0), **options):
    schedule = build(name, p, m, **options)
    return simulate(schedule, equal(schedule, *costs))


def random_costs(seed):
    """F, I, W with W <= I <= 2W and I <= F + W, where the published forms hold."""
    draw = random.Random(seed)
    weights = draw.uniform(0.5, 1.0)
    return draw.uniform(0.6, 1.4), draw.uniform(1.0, 1.6) * weights, weights


# The seconds of a step beside the work of a device: for p devices, a schedule's chunks v, and costs of F, I and W.
RAMPS = [
    *[(name, {}, lambda p, v, f, i, w: (p - 1) * (f + i + w)) for name in ("gpipe", "1f1b", "eager-1f1b", "pipedream")],
    *[
        (name, {"chunks": v}, lambda p, v, f, i, w: (p - 1) * (f + i + w) / v)
        for name in ("interleaved-1f1b", "looped-bfs")
        for v in (1, 2, 3)
    ],
    *[("interleaved-zb", {"chunks": v}, lambda p, v, f, i, w: (p - 1) * (f + i - w) / v) for v in (1, 2)],
    ("zb-h1", {}, lambda p, v, f, i, w: (p - 1) * (f + i - w)),
    ("zb-h2", {}, lambda p, v, f, i, w: (p - 1) * f),
    ("dualpipe-v", {}, lambda p, v, f, i, w: (p - 1) * (f + i - w) / 2),  # its pairs one after the other
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "ramp"), RAMPS)
def test_devices_idle_for_the_ramps_that_were_published(name, options, ramp):
    others = {"dualpipe-v": [(8, 16), (3, 7)], "zb-h2": []}.get(name, [] if options else [(4, 13)])
    for (p, m), seed in itertools.product([(2, 4), (3, 6), (4, 8), *others], range(2)):
        costs = random_costs(seed)
        expected = m * sum(costs) + ramp(p, options.get("chunks", 1), *costs)
        assert timeline(name, p, m, costs, **options).makespan == pytest.approx(expected)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (3, 2), (4, 8)])
def test_sequential_uses_one_device_at_a_time(p, m):
    found = timeline("sequential", p, m)
    assert found.makespan == 3 * p * m
    assert found.bubble == pytest.approx(1 - 1 / p)


def test_zb_h2_and_zb_v_have_no_bubble_where_steps_overlap():
    assert timeline("zb-h2", 4, 8).zero_bubble == pytest.approx(0)
    assert timeline("zb-v", 4, 8).zero_bubble == pytest.approx(0)


@pytest.mark.parametrize(
    ("name", "p", "m", "makespan", "peak"),
    [
        ("v-half", 4, 8, 26.5, 3), ("v-half", 8, 16, 56.5, 5), ("v-half", 16, 64, 212.5, 9),
        ("v-min", 4, 8, 29.5, 2), ("v-min", 8, 16, 61.5, 4), ("v-min", 16, 64, 221.5, 6),
        ("zb-v", 16, 64, 199.5, 16), ("interleaved-zb", 16, 64, 199.5, 16), ("dualpipe-v", 16, 64, 199.5, 16.5),
        ("dualpipe-v", 4, 8, 25.5, 4.5), ("interleaved-1f1b", 8, 32, 106.5, 11.5), ("looped-bfs", 8, 32, 106.5, 32),
        ("1f1b", 16, 64, 237, 16), ("gpipe", 16, 64, 237, 64), ("zb-h1", 4, 8, 27, 4), ("zb-h2", 4, 8, 27, 7),
    ],
)  # fmt: skip
def test_published_step_times_and_peaks_with_unit_costs(name, p, m, makespan, peak):
    found = timeline(name, p, m)
    assert found.makespan == pytest.approx(makespan)
    assert max(found.peak_bytes) == pytest.approx(peak)


@pytest.mark.parametrize("p", range(2, 11))
def test_v_half_and_v_min_keep_a_half_and_a_third(p):
    assert max(timeline("v-half", p, 3 * p).peak_bytes) == pytest.approx((p + 2) // 2)
    assert max(timeline("v-min", p, 3 * p).peak_bytes) <= (p + 4) // 3


@pytest.mark.parametrize("p", [2, 4, 8])
def test_chimera_idles_for_d_minus_2_slots(p):
    for units in (1, 2, 5):
        found = timeline("chimera", p, units * p, (1.0, 0.5, 0.5))
        assert found.makespan == pytest.approx(2 * units * p + p - 2)
        assert max(found.peak_bytes) <= p


@pytest.mark.parametrize(("p", "waves"), [(4, 1), (4, 2), (8, 1), (8, 2), (8, 4)])
def test_hanayo_reaches_the_bubble_of_its_paper_at_as_many_micro_batches_as_devices(p, waves):
    schedule = build("hanayo", p, p, waves=waves)
    assert schedule.model_stages == 2 * waves * p
    assert simulate(schedule, equal(schedule)).bubble <= (2 * p - 2) / (3 * p * waves + p - 1)


def test_pipedream_keeps_a_version_for_each_micro_batch_in_flight():
    schedule = build("pipedream", 4, 8)
    assert schedule.versions[3] == (0, 1, 2, 3, 4, 5, 6, 7)
    assert schedule.versions[0] == (0, 0, 0, 0, 1, 2, 3, 4)
    assert [sum(str(action).count("OPT_STEP") for action in row) for row in schedule.actions] == [8] * 4


def test_pipedream_2bw_lags_one_step_behind_on_all_stages():
    schedule = build("pipedream-2bw", 2, 12, accumulate=3)
    assert schedule.versions == ((0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2),) * 2
    assert [str(action) for action in schedule.actions[0] if action.kind == "OPT_STEP"] == [
        f"0OPT_STEP{k}" for k in (2, 5, 8, 11)
    ]
