"""``schedule="auto"`` is no slower than any named schedule or "search", whatever else is asked for."""

import itertools
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

import pipepart
from pipepart import Cluster, Link, Profile
from pipepart.planning.request import ANY_CHUNKS, CHUNKS
from tests.planning.problems import Layer, profile_of

COUNTS = (2, 4)
pytestmark = pytest.mark.usefixtures("no_suggestions")


def problem(seed: int) -> tuple[Profile, Cluster, bool]:
    """A random chain on two or three devices: unlike speeds, slow links, tight memory, ties, split backwards."""
    draw = Random(seed)
    split = draw.choice([None, -0.125, 0.125])
    layers = [
        Layer(
            forward=draw.choice([0.5, 1, 2, 4]),
            backward_input=draw.choice([0.5, 1, 2]),
            backward_weight=draw.choice([0, 1, 2]),
            parameters=draw.randint(0, 20),
            output=draw.randint(0, 20),
            saved=draw.randint(0, 40),
            waiting=draw.randint(0, 20),
            split=split,
        )
        for _ in range(draw.randint(4, 6))
    ]
    ties = draw.random() < 0.3
    if ties:
        layers[-1] = Layer(**{**vars(layers[-1]), "shares_with": (0,)})
    memory = draw.choice(["1GiB", "1GiB", "900B", "500B"])
    speeds = [draw.choice(["", "", "@0.5", "@2"]) for _ in range(draw.choice([2, 2, 3]))]
    cluster = Cluster.parse([memory + speed for speed in speeds], host_link=draw.choice([None, 20.0]))
    link = draw.choice([Link(), Link(bandwidth=100.0), Link(bandwidth=20.0, latency=0.5)])
    return profile_of(layers, COUNTS), cluster.model_copy(update={"link": link}), ties


def requests(layers: int) -> Iterator[dict[str, Any]]:
    """Every schedule with every number of stages a device, micro-batches and recompute mode."""
    for name, count, recompute in itertools.product(CHUNKS, COUNTS, ("auto", "never", "always")):
        for chunks in range(2, layers // 2 + 1) if name in ANY_CHUNKS else [None]:
            yield {"schedule": name, "micro_batches": count, "recompute": recompute, "chunks": chunks}
    for stages in range(1, layers + 1):
        yield {"schedule": "1f1b", "stages": stages}
        yield {"schedule": "looped-bfs", "stages": stages}
    for count, schedule in itertools.product(COUNTS, ("gpipe", "1f1b")):
        yield {"schedule": schedule, "micro_batches": count, "offload": "stash"}
    for count in COUNTS:
        yield {"schedule": "search", "micro_batches": count}


def check(seed: int, every: int = 1) -> None:
    profile, cluster, ties = problem(seed)
    steps: dict[str, float] = {}
    for options in itertools.islice(requests(len(profile.layers)), 0, None, every):
        try:
            made = pipepart.plan(profile, cluster, allow_split_ties=ties, **options)
        except ValueError:  # it does not fit, or there is no such schedule
            continue
        steps[str(options)] = made.predicted.step_seconds
    try:
        auto = pipepart.plan(profile, cluster, allow_split_ties=ties).predicted.step_seconds
        searched = pipepart.plan(profile, cluster, allow_split_ties=ties, schedule="search")
    except pipepart.InfeasiblePlanError:
        assert not steps
        return
    faster = {options: step for options, step in steps.items() if step < auto * (1 - 1e-9)}
    assert not faster, f"auto takes {auto}"
    assert auto * (1 - 1e-9) <= searched.predicted.step_seconds <= auto * (1 + 1e-9)


def test_no_other_request_is_faster() -> None:
    check(seed=1, every=7)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 14))
def test_no_other_request_is_faster_for_many_problems(seed: int) -> None:
    check(seed)
