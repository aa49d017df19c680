"""Steps as they would be measured if the layers of a plan cost something else than was thought."""

import random

import schedules
from pipepart import Cluster, Device, Link, Plan, Profile
from tests.planning.problems import Layer


def cluster_of(*speeds: float, latency: float = 0.0, bandwidth: float | None = None) -> Cluster:
    devices = tuple(
        Device(name=f"device:{index}", kind="made up", speed=speed) for index, speed in enumerate(speeds)
    )
    return Cluster(devices=devices, link=Link(latency=latency, bandwidth=bandwidth))


def true_layers(count: int, seed: int = 0) -> list[Layer]:
    draw = random.Random(seed)
    return [
        Layer(
            forward=draw.uniform(1, 9),
            backward_input=draw.uniform(1, 9),
            backward_weight=draw.uniform(0, 5),
            parameters=8,
            output=draw.randrange(1, 20),
            saved=draw.randrange(1, 20),
        )
        for _ in range(count)
    ]


def measured(plan: Plan, true: Profile) -> schedules.Timeline:
    """A step of the plan as it would be measured if the layers cost that."""
    return plan.model_copy(update={"profile": true}).refreshed().simulate()


def slowed(trace: schedules.Timeline, slow: dict[int, float]) -> schedules.Timeline:
    """The same step, its actions of some micro-batches longer by a factor, one after the other on each device."""
    starts, ends = [], []
    for row, row_starts, row_ends in zip(trace.schedule.actions, trace.starts, trace.ends, strict=True):
        now, own_starts, own_ends = 0.0, [], []
        for action, start, end in zip(row, row_starts, row_ends, strict=True):
            now = max(now, start)
            own_starts.append(now)
            now += (end - start) * slow.get(action.micro_batch or 0, 1.0)
            own_ends.append(now)
        starts.append(own_starts)
        ends.append(own_ends)
    return schedules.Timeline(trace.schedule, starts, ends)
