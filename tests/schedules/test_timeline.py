"""The figures of simulated and measured timelines."""

import pytest

from schedules import Action, ScheduleError, StageCosts, Timeline, build, simulate


def equal(stages, **more):
    return StageCosts([1.0] * stages, [1.0] * stages, [1.0] * stages, **more)


def measured():
    """Two devices; the second is 1 s late with its forward, and the times start at 100 s."""
    schedule = build("1f1b", 2, 1)
    return Timeline(schedule, [[100.0, 107.0], [103.0, 105.0]], [[102.0, 109.0], [105.0, 106.0]])


def test_a_measured_timeline_needs_no_costs():
    timeline = measured()
    assert timeline.makespan == 9.0
    assert timeline.busy == (4.0, 3.0)
    assert timeline.bubble == pytest.approx(1 - 7 / 18)
    assert timeline.zero_bubble_seconds == 9.0
    assert timeline.draw(width=30).count("\n") == 1


def test_idle_time_is_split_by_what_the_device_waits_for():
    first, second = measured().idle
    assert (first.producer, first.transfer, first.finished) == (4.0, 1.0, 0.0)
    assert (second.producer, second.transfer, second.finished) == (2.0, 1.0, 3.0)


def test_the_drawing_is_to_scale_with_one_line_per_device():
    drawn = simulate(build("1f1b", 4, 8), equal(4)).draw(width=36).splitlines()
    assert drawn == [
        "0 |0123......0b41b52b63b74b.5b.6b.7b",
        "1 |.012....0b31b42b53b64b75b.6b.7b..",
        "2 |..01..0b21b32b43b54b65b76b.7b....",
        "3 |...00b11b22b33b44b55b66b77b......",
    ]


def test_a_long_timeline_goes_on_below():
    panels = simulate(build("1f1b", 8, 32), equal(8)).draw(width=100).split("\n\n")
    assert len(panels) == 3
    assert all(len(panel.splitlines()) == 8 for panel in panels)
    assert all(len(line) <= 100 for panel in panels for line in panel.splitlines())


def test_times_that_do_not_match_the_actions_are_refused():
    schedule = build("1f1b", 2, 1)
    with pytest.raises(ScheduleError, match="starts are given for"):
        Timeline(schedule, [[0.0], [0.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]])
    with pytest.raises(ScheduleError, match=r"1B0 ends at 0\.5, before it starts at 1\.0"):
        Timeline(schedule, [[0.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [1.0, 0.5]])


def test_an_action_that_is_not_there_has_no_span():
    with pytest.raises(ScheduleError, match="no action 5F0"):
        measured().span(Action.parse("5F0"))
