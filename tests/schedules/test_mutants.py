"""Every mutant of a legal schedule is refused, or proven to be a correct step all the same."""

import random
from dataclasses import replace

import pytest

from schedules import (
    Kind,
    Schedule,
    ScheduleError,
    build,
    check,
    insert_optimizer_step,
    insert_reduce_grad,
    names,
)


def is_a_correct_step(schedule):
    """Play the schedule in an independent way: one action at a time, any that can, and count what happened.

    Every device runs its list; a forward needs the forward before it, a backward the forward of its stage and
    the backward after it, W the I of its stage. Correct is: nothing is left, and every stage of one copy of
    the model has run every micro-batch forward once and backward once.
    """
    if schedule.micro_batches < 1:
        return False
    queues = [list(row) for row in schedule.actions]
    done = set()
    runs = []
    moved = True
    while moved:
        moved = False
        for device, queue in enumerate(queues):
            while queue and all(can_run(schedule, device, leaf, done, queue[0]) for leaf in queue[0].leaves):
                for leaf in queue.pop(0).leaves:
                    done.add((leaf.kind, leaf.stage, leaf.micro_batch))
                    runs.append((leaf.kind, leaf.stage, leaf.micro_batch))
                moved = True
    return not any(queues) and is_complete(schedule, runs)


def can_run(schedule, device, leaf, done, whole):
    kind, stage, k = leaf.kind, leaf.stage, leaf.micro_batch
    per_model = schedule.stages // schedule.replicas

    def backward_done(at):
        return (Kind.B, at, k) in done or (Kind.I, at, k) in done

    if not 0 <= stage < schedule.stages or schedule.device_of[stage] != device:
        return False
    if kind is Kind.F:
        return stage % per_model == 0 or (Kind.F, stage - 1, k) in done
    if kind in (Kind.B, Kind.I):
        return (Kind.F, stage, k) in done and ((stage + 1) % per_model == 0 or backward_done(stage + 1))
    if kind is Kind.W:
        return (Kind.I, stage, k) in done
    return True


def is_complete(schedule, runs):
    per_model = schedule.stages // schedule.replicas
    expected = set()
    for k in range(schedule.micro_batches):
        copies = {stage // per_model for kind, stage, number in runs if kind is Kind.F and number == k}
        if len(copies) != 1:
            return False
        expected |= {(stage, k) for stage in range(copies.pop() * per_model, schedule.stages)[:per_model]}
    forwards = [(stage, k) for kind, stage, k in runs if kind is Kind.F]
    inputs = [(stage, k) for kind, stage, k in runs if kind in (Kind.B, Kind.I)]
    weights = [(stage, k) for kind, stage, k in runs if kind in (Kind.B, Kind.W)]
    return all(len(ran) == len(expected) and set(ran) == expected for ran in (forwards, inputs, weights))


def place(draw, rows):
    """A list of actions, and the place of one of them."""
    row = draw.choice([row for row in rows if row])
    return row, draw.randrange(len(row))


def drop(draw, rows):
    row, at = place(draw, rows)
    row.pop(at)


def duplicate(draw, rows):
    row, at = place(draw, rows)
    row.insert(draw.randrange(len(row) + 1), row[at])


def swap(draw, rows):
    row, at = place(draw, [row for row in rows if len(row) > 1] or rows)
    other = draw.randrange(len(row))
    row[at], row[other] = row[other], row[at]


def move(draw, rows):
    (row, at), target = place(draw, rows), draw.choice(rows)
    target.insert(draw.randrange(len(target) + 1), row.pop(at))


def renumber(draw, rows):
    row, at = place(draw, rows)
    action, field = row[at], "stage" if draw.random() < 0.5 else "micro_batch"
    if action.parts:
        parts = list(action.parts)
        parts[draw.randrange(2)] = parts[0]._replace(micro_batch=draw.randrange(9))
        row[at] = action._replace(parts=tuple(parts))
    else:
        row[at] = action._replace(**{field: draw.randrange(9)})


def change_kind(draw, rows):
    row, at = place(draw, rows)
    row[at] = row[at]._replace(kind=draw.choice([Kind.F, Kind.B, Kind.I, Kind.W]), parts=())


MUTATIONS = (drop, duplicate, swap, move, renumber, change_kind)


def mutant(draw, schedule, mutate):
    rows = [list(row) for row in schedule.actions]
    mutate(draw, rows)
    return replace(schedule, actions=tuple(map(tuple, rows)))


def refused(schedule):
    try:
        check(schedule)
    except ScheduleError:
        return True
    return False


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("mutate", MUTATIONS)
def test_a_mutant_is_refused_exactly_where_it_is_no_correct_step(name, mutate):
    draw = random.Random(f"{name} {mutate.__name__}")
    for p, m, mutants in ((2, 4, 10), (4, 4, 6)):
        schedule = build(name, p, m)
        assert is_a_correct_step(schedule)
        for _ in range(mutants):
            changed = mutant(draw, schedule, mutate)
            if changed.actions == schedule.actions:
                continue
            if schedule.versions and any(a.kind is Kind.OPT_STEP for a in moved_actions(schedule, changed)):
                continue  # optimizer steps have a test of their own
            if refused(changed):
                assert schedule.versions or has_bad_pair(changed) or not is_a_correct_step(changed)
            else:
                assert is_a_correct_step(changed)


def moved_actions(before, after):
    """The actions at the places where two schedules differ."""
    return [
        action
        for old, new in zip(before.actions, after.actions, strict=True)
        for pair in zip(old, new, strict=False)
        if pair[0] != pair[1]
        for action in pair
    ]


def has_bad_pair(schedule):
    """An overlapped pair whose halves are not one forward and one backward of two micro-batches."""
    return any(
        action.parts
        and (action.parts[0].kind is not Kind.F or action.parts[0].micro_batch == action.parts[1].micro_batch)
        for row in schedule.actions
        for action in row
    )


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("mutate", [drop, duplicate, move, renumber])
def test_a_reduction_or_a_step_cannot_be_lost_doubled_or_renamed(name, mutate):
    draw = random.Random(f"{name} {mutate.__name__} all")
    reduced = insert_reduce_grad(build(name, 4, 4))
    schedule = reduced if reduced.versions else insert_optimizer_step(reduced)
    survivors = 0
    for _ in range(8):
        changed = mutant(draw, schedule, mutate)
        if changed.actions != schedule.actions and not refused(changed):
            survivors += 1
            assert mutate is move
            assert [sorted(row) for row in changed.actions] == [sorted(row) for row in schedule.actions]
    assert survivors < 5


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_optimizer_steps_of_asynchronous_schedules_keep_their_place(name):
    schedule = build(name, 2, 4)
    late = Schedule.from_csv(schedule.to_csv())
    with pytest.raises(ScheduleError, match=r"repeats|names no micro-batch"):
        check(late)
    with pytest.raises(ScheduleError, match="uses version 9, but"):
        check(replace(schedule, versions=((9,) * 4, schedule.versions[1])))
    with pytest.raises(ScheduleError, match="versions must hold 2 rows of 4 numbers"):
        check(replace(schedule, versions=schedule.versions[:1]))
    for row, actions in enumerate(schedule.actions):
        for at, action in enumerate(actions):
            if action.kind is Kind.OPT_STEP:
                rows = list(schedule.actions)
                rows[row] = actions[:at] + actions[at + 1 :]
                assert refused(replace(schedule, actions=tuple(rows)))
                rows[row] = (action, *actions[:at], *actions[at + 1 :])
                assert refused(replace(schedule, actions=tuple(rows)))
