"""``schedules.check`` rejects impossible schedules, with an error that names the action."""

import pytest

from schedules import Schedule, ScheduleError, StageCosts, build, check


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("0F0\n1F0,1B0\n", "0F0 .* has no full backward: 0B0 or 0I0 and 0W0 are missing"),
        ("0F0,0I0\n1F0,1B0\n", "0F0 .* has no full backward: 0W0 is missing"),
        ("0F0,0B0\n1B0\n", "1F0 is missing, though 0F0 is there"),
        ("0F0,0B0\n1F0,1F0,1B0\n", "1F0 stands twice: at device 1, position 0 and at device 1, position 1"),
        ("0F0,0B0,0I0,0W0\n1F0,1B0\n", "0B0 .* conflicts with 0I0"),
        ("0B0,0F0\n1F0,1B0\n", "0B0 at device 0, position 0 needs 0F0, which comes at device 0, position 1"),
        ("0F0,0W0,0I0\n1F0,1B0\n", "0W0 .* needs 0I0"),
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "deadlock: .*device 0 at 0B0 for 1B0"),
        ("0F0,0B0,0F2,0B2\n1F0,1B0,1F2,1B2\n", "micro-batch 1 has no forward: 0F1 is missing"),
        ("0F0,(0F1;0B1)OVERLAP_F_B,0B0\n", "0B1 at .* needs 0F1, which comes at"),
        ("0F0,(0B0;0F1)OVERLAP_F_B,0B1\n", "must overlap one forward with one backward"),
        ("0F0,0B0,0RECOMPUTE0\n", "0B0 .* needs 0RECOMPUTE0, which comes at"),
        ("0RECOMPUTE0,0F0,0B0\n", "0RECOMPUTE0 .* needs 0F0, which comes at"),
        ("0F0,0REDUCE_GRAD,0B0\n", "0REDUCE_GRAD .* comes before 0B0"),
        ("0F0,0B0,0REDUCE_GRAD\n1F0,1B0\n", "1REDUCE_GRAD is missing, though 0REDUCE_GRAD"),
        ("0F0,0B0,0OPT_STEP,0F1,0B1\n", "0OPT_STEP .* comes before 0B1"),
        ("0F0,0B0,0OPT_STEP,0REDUCE_GRAD\n", "0OPT_STEP .* comes before 0REDUCE_GRAD"),
        ("0F0,0B0,0OPT_STEP\n1F0,1B0\n", "1OPT_STEP is missing"),
    ],
)
def test_an_impossible_schedule_is_refused_by_name(table, message):
    with pytest.raises(ScheduleError, match=message):
        check(Schedule.from_csv(table))


def test_an_action_on_another_device_than_its_stage_is_refused():
    schedule = build("1f1b", 2, 2)
    moved = Schedule("moved", schedule.actions[::-1], schedule.device_of, 2)
    with pytest.raises(ScheduleError, match="1F0 stands at device 0, position 0, but stage 1 is on device 1"):
        check(moved)


def test_a_micro_batch_out_of_range_is_refused():
    schedule = build("1f1b", 2, 3)
    with pytest.raises(ScheduleError, match="no micro-batch 2 among 2"):
        check(Schedule("renumbered", schedule.actions, schedule.device_of, 2))


def test_a_micro_batch_in_two_copies_of_the_model_is_refused():
    with pytest.raises(ScheduleError, match="1F0 repeats 0F0 in another copy of the model"):
        check(Schedule.from_csv("0F0,0B0\n1F0,1B0\n", replicas=2))


def test_a_peak_over_the_memory_is_refused_with_the_action_that_reaches_it():
    costs = StageCosts([1, 1], [1, 1], [1, 1], stash_bytes=[10, 10])
    schedule = build("1f1b", 2, 4)
    check(schedule, costs, memory=[20, 10])
    with pytest.raises(
        ScheduleError, match="0F1 on device 0 raises its stash to 20 bytes, it has room for 15"
    ):
        check(schedule, costs, memory=[15, 10])


def test_memory_without_costs_is_refused_and_so_is_memory_of_other_devices():
    schedule = build("1f1b", 2, 4)
    with pytest.raises(ScheduleError, match="memory= cannot be checked without costs="):
        check(schedule, memory=[1, 1])
    with pytest.raises(ScheduleError, match="memory has 1 numbers for 2 devices"):
        check(schedule, StageCosts([1, 1], [1, 1], [1, 1], stash_bytes=[1, 1]), memory=[1])
