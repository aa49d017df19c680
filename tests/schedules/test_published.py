"""Each generator's step time and memory against the closed forms and the figures that were published.

Table 5 of the zero-bubble paper, the runs of Megatron-Turing NLG, and the table of DeepSeek-V3 are among them.
"""

import itertools
import json
import random
from pathlib import Path

import pytest

from schedules import StageCosts, build, search, simulate


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
        ("sequential", 1, 3, 9, 1), ("sequential", 3, 2, 18, 1), ("sequential", 4, 8, 96, 1),
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


TABLES = Path(__file__).parents[1] / "data" / "schedules" / "zero_bubble_tables.json"
ROWS = json.loads(TABLES.read_text())["rows"]


def name_of(row):
    return f"{row['model']}-{row['micro_batches']}"


def costs_of(row):
    """A micro-batch keeps M_B until its I and M_W from there to its W (the paper's Table 1)."""
    p, h, a, s = row["devices"], row["hidden"], row["heads"], row["sequence"]
    return StageCosts(
        [row["forward_ms"]] * p,
        [row["backward_input_ms"]] * p,
        [row["backward_weight_ms"]] * p,
        latency=row["communication_ms"],
        stash_bytes=[1.0] * p,
        weight_stash_bytes=[32 * h / (34 * h + 5 * a * s)] * p,
    )


@pytest.mark.parametrize("row", ROWS, ids=name_of)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
def test_the_handcrafted_columns_to_four_decimals(row, name):
    timeline = simulate(build(name, row["devices"], row["micro_batches"]), costs_of(row))
    assert round(timeline.zero_bubble, 4) == row["bubble"][name]


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_a_replay_of_interleaved_1f1b_takes_one_trip_of_latency_more_than_printed(row):
    """The printed column follows from a closed form."""
    p, m, v = row["devices"], row["micro_batches"], row["chunks_interleaved"]
    stages = p * v
    costs = StageCosts(
        [row["forward_ms"] / v] * stages,
        [row["backward_input_ms"] / v] * stages,
        [row["backward_weight_ms"] / v] * stages,
        latency=row["communication_ms"],
    )
    work = row["forward_ms"] + row["backward_input_ms"] + row["backward_weight_ms"]
    printed = m * work + (p - 1) * work / v + (2 * p * (v - 1) + p - 2) * row["communication_ms"]
    assert round(1 - m * work / printed, 4) == row["bubble"]["interleaved-1f1b"]
    replayed = simulate(build("interleaved-1f1b", p, m, chunks=v), costs).zero_bubble_seconds
    assert replayed == pytest.approx(printed + p * row["communication_ms"])


def automatic(row, factor, effort):
    """The bubble of a searched schedule with memory for factor * devices micro-batches."""
    p, m = row["devices"], row["micro_batches"]
    costs = costs_of(row)
    found = search(costs, p, m, [factor * p] * p, objective="zero-bubble", effort=effort)
    timeline = simulate(found, costs)
    assert max(timeline.peak_bytes) <= factor * p + 1e-9
    return timeline.zero_bubble


@pytest.mark.parametrize("row", [row for row in ROWS if row["devices"] == 8], ids=name_of)
@pytest.mark.parametrize(("name", "factor"), [("zb-1p", 1), ("zb-2p", 2)])
def test_the_automatic_columns_as_printed_or_lower(row, name, factor):
    # The paper's own heuristic is better in one row, by 0.13 % of the step.
    allowed = 0.0013 if (name, row["model"], row["micro_batches"]) == ("zb-2p", "1.5B", 24) else 0.0
    assert round(automatic(row, factor, effort=0.05), 4) <= row["bubble"][name] + allowed


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if row["micro_batches"] in (48, 96)], ids=name_of)
@pytest.mark.parametrize(("name", "factor"), [("zb-1p", 1), ("zb-2p", 2)])
def test_the_automatic_columns_of_many_devices_as_printed_or_lower(row, name, factor):
    assert round(automatic(row, factor, effort=1.0), 4) <= row["bubble"][name]


# Megatron-Turing NLG 530B, Smith et al. 2022, arXiv 2201.11990, section 2: 35 pipeline stages of 8-way tensor
# parallelism, a batch of 1,920 sequences, one sequence a micro-batch: DGX A100 servers, seconds of an iteration.
@pytest.mark.parametrize(
    ("servers", "seconds", "bubble"), [(280, 60.1, 274), (350, 50.2, 226), (420, 44.4, 194)]
)
def test_the_published_iterations_of_530b_parameters_follow_from_one_of_them(servers, seconds, bubble):
    """The bubble grows with the replicas; the all-reduce of gradients, 4.5% at most, is left out."""

    def step(count):  # a server is one stage of one replica
        ones = [1.0] * 35
        return simulate(build("1f1b", 35, 1920 * 35 // count), StageCosts(ones, ones, ones))

    assert step(servers).bubble == pytest.approx(34 / bubble)
    simulated = 60.1 / step(280).makespan * step(servers).makespan
    assert seconds * (1 - 0.045) < simulated <= seconds


@pytest.mark.parametrize(("f", "i", "w"), [(1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (2.0, 3.0, 1.0)])
def test_the_bubbles_of_deepseek_v3(f, i, w):
    """Table 2 of the DeepSeek-V3 report, arXiv 2412.19437, for its 16 pipeline stages: B is I and W."""
    micro_batches, b = 64, i + w

    def idle(name, devices):
        schedule = build(name, devices, micro_batches)
        stages = schedule.stages
        timeline = simulate(schedule, StageCosts([f] * stages, [i] * stages, [w] * stages))
        return timeline.makespan - micro_batches * (f + b) * stages / devices

    assert idle("1f1b", 16) == pytest.approx(15 * (f + b))
    assert idle("zb-h1", 16) == pytest.approx(15 * (f + b - 2 * w))
    assert idle("dualpipe-v", 8) <= (16 / 2 - 1) * ((f + b) + b - 3 * w)  # F&B takes as long as F and B
