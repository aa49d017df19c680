"""The summary of a plan, its picture, and the plan against the steps that ran."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rich.console import RenderableType

from pipepart import Cluster, InfeasiblePlanError, Plan, Profile, plan
from pipepart.capture import SharedTensor
from pipepart.planning import Alternative
from pipepart.reporting import (
    alternatives_options,
    alternatives_table,
    drawn_timeline,
    edited_note,
    infeasible_report,
    measured_against_plan,
    plan_summary,
)
from pipepart.units import format_seconds

Printed = Callable[[RenderableType], str]


def test_the_summary_tells_schedule_step_speed_up_bubble_and_bottleneck(
    printed: Printed, two_stages: Plan
) -> None:
    text = printed(plan_summary(two_stages))
    predicted = two_stages.predicted
    assert "1f1b, 4 micro-batches, 2 stages on 2 devices" in text
    assert f"{predicted.serial_seconds / predicted.step_seconds:.2f}, against 50 ms" in text
    assert f"{predicted.bubble:.0%} of the devices' time" in text
    assert "proven: no allowed cut into 2 stages that fits has a smaller bottleneck" in text


def test_the_summary_of_an_asynchronous_plan_says_that_its_numbers_are_others(
    printed: Printed, two_stages: Plan
) -> None:
    assert two_stages.profile is not None
    made = plan(two_stages.profile, two_stages.cluster, schedule="pipedream")
    assert "not the numbers of plain training" in printed(plan_summary(made))
    assert "asynchronous" not in printed(plan_summary(two_stages))


def test_the_summary_tells_which_layers_of_different_stages_share_a_parameter(
    printed: Printed, two_stages: Plan
) -> None:
    assert "share" not in printed(plan_summary(two_stages))
    first, last = two_stages.stages[0].layers[0], two_stages.stages[1].layers[-1]
    assert two_stages.profile is not None
    layers = [
        layer.model_copy(update={"shared": (SharedTensor(layer=first, name="weight", bytes=0),)})
        if layer.name == last
        else layer
        for layer in two_stages.profile.layers
    ]
    tied = two_stages.model_copy(
        update={"profile": two_stages.profile.model_copy(update={"layers": tuple(layers)})}
    )
    assert f"'{first}' (stage 0) and '{last}' (stage 1)" in printed(plan_summary(tied))


def predicted_as(made: Plan, **figures: float) -> Plan:
    return made.model_copy(update={"prediction": made.predicted.model_copy(update=figures)})


def test_the_bottleneck_is_the_device_with_the_largest_load(printed: Printed, four_chunks: Plan) -> None:
    assert "stages 0, 2 on device:1, 13 ms per micro-batch" in printed(plan_summary(four_chunks))


def test_what_is_not_proven_is_bounded_or_said_to_be_unknown(printed: Printed, two_stages: Plan) -> None:
    bottleneck = two_stages.predicted.bottleneck_seconds
    near = printed(plan_summary(predicted_as(two_stages, bottleneck_bound=bottleneck / 1.25)))
    assert "its bottleneck is at most 25.0% above the smallest for 2 stages on these devices" in near
    unknown = printed(plan_summary(predicted_as(two_stages, bottleneck_bound=0.0)))
    assert "its bottleneck is not proven to be the smallest" in unknown


def test_what_is_proven_of_the_step_is_told_apart_from_the_cut(printed: Printed, two_stages: Plan) -> None:
    text = printed(plan_summary(two_stages))
    bound, gap = format_seconds(two_stages.step_bound), two_stages.step_gap
    assert gap > 0
    assert f"no plan on these 2 devices with 4 micro-batches takes less than {bound}" in text
    assert f"this step is at most {gap:.1%} above that bound" in text
    assert two_stages.profile is not None
    alone = plan(two_stages.profile, Cluster.virtual(1), schedule="sequential", stages=1)
    assert "proven: no plan on this device with 4 micro-batches has a shorter step" in printed(
        plan_summary(alone)
    )


def test_a_search_that_was_cut_off_is_told(printed: Printed, two_stages: Plan) -> None:
    for out_of_time in (True, False):
        text = printed(plan_summary(two_stages.model_copy(update={"out_of_time": out_of_time})))
        assert ("its time was up before it ended" in text) == out_of_time


def test_the_order_of_unlike_devices_is_told(printed: Printed, two_stages: Plan, four_chunks: Plan) -> None:
    assert "device:1, device:0 (the cluster lists them in another order)" in printed(
        plan_summary(four_chunks)
    )
    assert "another order" not in printed(plan_summary(two_stages))


def test_devices_that_are_not_used_are_named(printed: Printed, profile: Profile) -> None:
    text = printed(plan_summary(plan(profile, Cluster.virtual(3), stages=2, schedule="1f1b")))
    assert "2 stages on 2 of 3 devices" in text
    assert "unused      virtual:2" in text


def test_what_split_backwards_gain_is_told(printed: Printed, profile: Profile) -> None:
    cut = [profile.layers[1].name]
    plain = plan(profile, Cluster.virtual(2), schedule="1f1b", micro_batches=4, cut_before=cut)
    assert "critical path" not in printed(plan_summary(plain))
    early = plain.model_copy(update={"split_critical": ("1B3",)}).refreshed()
    gain = plain.predicted.step_seconds - early.predicted.step_seconds
    assert gain > 0
    text = printed(plan_summary(early))
    assert "1 backward on the critical path split into input and weight gradients" in text
    assert f"gradients: {format_seconds(gain)} less" in text


def test_whether_it_fits_is_told_by_the_fullest_device(printed: Printed, two_stages: Plan) -> None:
    assert "fits: the fullest device is virtual:0, 8.0 MiB of 64.0 MiB (13%)" in printed(
        plan_summary(two_stages)
    )


def test_what_recompute_costs_and_saves_is_told(printed: Printed, again: Plan, two_stages: Plan) -> None:
    text = printed(plan_summary(again))
    assert "stages 0, 1: 3.75 ms more per micro-batch, 8.0 KiB less stash" in text
    assert "recompute" not in printed(plan_summary(two_stages))


OTHERS = (
    Alternative(
        schedule="gpipe",
        micro_batches=4,
        chunks=1,
        stages=2,
        step_seconds=0.040,
        memory_bytes=2048,
        why="23.8% slower",
    ),
    Alternative(
        schedule="gpipe",
        micro_batches=2,
        chunks=1,
        stages=2,
        step_seconds=0.050,
        memory_bytes=2048,
        why="54.8% slower",
    ),
    Alternative(schedule="hanayo", micro_batches=4, chunks=2, stages=4, why="does not fit"),
)


def test_alternatives_stand_below_what_was_taken(printed: Printed, two_stages: Plan) -> None:
    made = two_stages.model_copy(update={"alternatives": OTHERS})
    lines = [" ".join(line.split()) for line in printed(alternatives_table(made)).splitlines()]
    assert lines[4].startswith("1f1b 4 2 1 ")
    assert lines[4].endswith("chosen")
    assert lines[5:] == [
        "1 gpipe 4 2 1 40.00 2.0 KiB 23.8% slower",
        "2 gpipe 2 2 1 50.00 2.0 KiB 54.8% slower",
        "3 hanayo 4 4 2 – – does not fit",
    ]
    assert printed(alternatives_options(made)).splitlines()[1:] == [
        "1. --schedule gpipe --micro-batches 4 --stages 2 --chunks 1",
        "2. --schedule gpipe --micro-batches 2 --stages 2 --chunks 1",
    ]


def test_few_alternatives_are_the_best_of_each_schedule(printed: Printed, two_stages: Plan) -> None:
    made = two_stages.model_copy(update={"alternatives": OTHERS})
    text = printed(alternatives_table(made, compact=True))
    assert "23.8%" in text
    assert "54.8%" not in text
    assert "And 2 more" in text


def test_what_would_fit_is_told_as_options(printed: Printed, profile: Profile) -> None:
    whole = plan(profile, Cluster.virtual(1), schedule="1f1b", micro_batches=4).predicted.memory_bytes[0]
    with pytest.raises(InfeasiblePlanError) as caught:
        plan(profile, Cluster.virtual(1, memory=whole - 1), schedule="1f1b", micro_batches=4)
    text = printed(infeasible_report(caught.value))
    assert text.startswith("The model does not fit: with 1 stage, 4 micro-batches")
    assert "  1. --more-devices 1: " in text
    assert "cluster=" not in text


def test_an_edited_plan_is_held_against_its_file(printed: Printed, two_stages: Plan) -> None:
    assert edited_note(two_stages, two_stages) is None
    before = predicted_as(two_stages, step_seconds=two_stages.predicted.step_seconds / 2)
    note = edited_note(before, two_stages)
    assert note is not None
    assert "100.0% longer" in note.plain


def test_a_plan_written_by_hand_has_a_summary_too(printed: Printed, two_stages: Plan) -> None:
    by_hand = two_stages.model_copy(update={"prediction": None})
    assert "written by hand" in printed(plan_summary(by_hand))


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_timeline_is_as_wide_as_the_terminal(
    printed: Printed, two_stages: Plan, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = printed(drawn_timeline(two_stages.simulate())).splitlines()
    assert [len(line) for line in lines if "|" in line] == [width, width]


def test_the_legend_names_what_is_in_the_picture(
    printed: Printed, two_stages: Plan, four_chunks: Plan, again: Plan
) -> None:
    plain = printed(drawn_timeline(two_stages.simulate(), devices=["virtual:0", "virtual:1"]))
    assert plain.endswith("One line a device. 0f: forward of micro-batch 0; 0b: its backward; dots: idle.\n")
    assert "0r: recompute" in printed(drawn_timeline(again.simulate()))
    names = [device.name for device in four_chunks.workers]
    several = printed(drawn_timeline(four_chunks.simulate(), devices=names))
    assert "(0 device:1, 1 device:0)" in several
    assert "capitals: every second stage" in several


def test_measured_steps_are_held_against_the_prediction(printed: Printed, two_stages: Plan) -> None:
    predicted = two_stages.predicted.step_seconds
    line = printed(measured_against_plan(two_stages, [predicted * factor for factor in (1, 1.25, 9)]))
    assert "(median of 3): 25% longer" in line
    assert "shorter" in printed(measured_against_plan(two_stages, [predicted * 0.8]))
    assert "as predicted" in printed(measured_against_plan(two_stages, [predicted]))


def test_no_measured_step_is_refused(two_stages: Plan) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        measured_against_plan(two_stages, [])
