"""``schedules.check`` rejects impossible schedules, with an error that names the action."""

import pytest

from schedules import Schedule, ScheduleError, check


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
