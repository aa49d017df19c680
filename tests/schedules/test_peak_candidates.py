"""``peak_candidates``: for any byte sizes, the largest candidate equals the memory peak."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import (
    Schedule,
    ScheduleError,
    StageCosts,
    build,
    insert_recompute,
    names,
    peak_candidates,
    simulate,
    split_overlaps,
)


def counts(text: str) -> list[list[list[int]]]:
    """Of the only device."""
    return sorted(peak_candidates(Schedule.from_csv(text))[0].tolist())


def test_whole_stashes_are_counted_until_their_backward_has_ended():
    assert counts("0F0,0F1,0B0,0F2,0B1,0B2\n") == [[[2, 0, 0]]]


def test_what_waits_for_the_weights_is_there_from_the_first_part_to_the_second():
    assert counts("0F0,0I0,0F1,0I1,0W0,0W1\n") == [[[0, 0, 2]], [[1, 0, 1]]]


def test_inputs_become_stashes_where_their_forward_runs_again():
    assert counts("0F0,0F1,0F2,0RECOMPUTE0,0B0,0RECOMPUTE1,0B1,0RECOMPUTE2,0B2\n") == [
        [[0, 3, 0]],
        [[1, 2, 0]],
    ]


def test_a_stash_made_again_stays_until_the_first_part_of_its_backward():
    text = "0F0,0F1,0RECOMPUTE0,0I0,0RECOMPUTE1,0I1,0W0,0W1\n"
    assert counts(text) == [[[0, 0, 2]], [[0, 1, 1]], [[0, 2, 0]], [[1, 0, 1]], [[1, 1, 0]]]


def test_stages_of_one_device_are_counted_together():
    """Stage 0 holds two while stage 1 holds none, and one while stage 1 holds one."""
    text = "0F0,1F0,1B0,0F1,0B0,1F1,1B1,0B1\n"
    assert counts(text) == [[[1, 0, 0], [1, 0, 0]], [[2, 0, 0], [0, 0, 0]]]


def test_an_overlapped_pair_releases_nothing_before_it_has_ended():
    assert counts("0F0,0B0,0F1,0B1\n") == [[[1, 0, 0]]]
    assert counts("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n") == [[[2, 0, 0]]]


@st.composite
def schedules_with_recompute(draw: st.DrawFn) -> Schedule:
    """Any schedule of a few devices in which some stages run some forwards again."""
    name = draw(st.sampled_from([name for name in names() if name != "pipedream"]))
    devices, micro_batches = draw(st.sampled_from([2, 3, 4])), draw(st.integers(1, 9))
    for chunks in (1, 2):
        try:
            bare = build(name, devices=devices, micro_batches=micro_batches, chunks=chunks)
        except ScheduleError:
            continue
        stages = draw(st.sets(st.integers(0, bare.stages - 1)))
        parts = draw(
            st.sampled_from([range(micro_batches), range(micro_batches - 1), range(0, micro_batches, 2)])
        )
        return split_overlaps(insert_recompute(bare, stages, parts))
    return build("1f1b", devices=devices, micro_batches=micro_batches)


sizes = st.lists(st.integers(0, 1000), min_size=8, max_size=8)


@given(schedule=schedules_with_recompute(), stashes=sizes, inputs=sizes, waiting=sizes)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_the_peak_of_any_sizes_is_that_of_the_simulation(schedule: Schedule, stashes, inputs, waiting):
    """Inputs, and what waits for the weights, larger than what a stage keeps among them."""
    stages = schedule.model_stages
    costs = StageCosts(
        [1] * stages, [1] * stages, [1] * stages,
        stash_bytes=stashes[:stages], boundary_bytes=inputs[:stages], weight_stash_bytes=waiting[:stages],
    )  # fmt: skip
    peaks = simulate(schedule, costs).peak_bytes
    for device, (moments, peak) in enumerate(zip(peak_candidates(schedule), peaks, strict=True)):
        own = [stage % stages for stage in schedule.stages_of(device)]
        weights = [[stashes[stage], inputs[stage], waiting[stage]] for stage in own]
        assert (moments * weights).sum(axis=(1, 2)).max() == pytest.approx(peak, abs=0)
        # No moment is there that another one exceeds.
        for index, one in enumerate(moments):
            for other in moments[index + 1 :]:
                assert (one > other).any()
                assert (other > one).any()
