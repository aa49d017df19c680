"""``schedules.build`` builds schedules by name."""

import pytest

from schedules import ScheduleError, StageCosts, build


def test_unknown_names_list_the_known_ones():
    with pytest.raises(
        ScheduleError, match=r"no schedule is called '1flb'; did you mean '1f1b'\? there are .*zb-v"
    ):
        build("1flb", 4, 8)
    with pytest.raises(ScheduleError, match="no schedule is called 'x'; there are"):
        build("x", 4, 8)


def test_options_that_a_schedule_does_not_have_are_refused():
    with pytest.raises(ScheduleError, match="1f1b has no option 'waves'"):
        build("1f1b", 4, 8, waves=2)
    with pytest.raises(ScheduleError, match="gpipe needs chunks=1, got chunks=2"):
        build("gpipe", 4, 8, chunks=2)


def test_a_search_takes_its_chunks_from_the_costs_and_refuses_others():
    costs = StageCosts([1] * 4, [1] * 4, [1] * 4)
    assert build("search", 2, 2, chunks=2, costs=costs, effort=0.01).stages == 4
    with pytest.raises(ScheduleError, match="chunks=3 on 2 devices needs costs of 6 stages, got costs of 4"):
        build("search", 2, 2, chunks=3, costs=costs)
    with pytest.raises(ScheduleError, match="search has no option 'waves'; it has costs, effort"):
        build("search", 2, 2, costs=costs, waves=2)
