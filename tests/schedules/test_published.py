"""Published figures: Table 5 of the zero-bubble paper, the runs of Megatron-Turing NLG, the table of DeepSeek-V3."""

import json
from pathlib import Path

import pytest

from schedules import StageCosts, build, search, simulate

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
