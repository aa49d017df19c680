"""``compress=``: which links it marks, and what messages on them are predicted to take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pipepart
from pipepart import Cluster, Plan, Profile, Roofline
from pipepart.cluster import PairLink
from pipepart.planning import replan

pytestmark = pytest.mark.usefixtures("short_profiles")

WIDTH = 256


@pytest.fixture(scope="module")
def profile() -> Profile:
    """Of estimated times, which are the same on every machine."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    x, speed = torch.randn(8, WIDTH), Roofline.parse("cpu: 50 GFLOP/s, 10 GB/s, 1 us")
    loss: dict[str, Any] = {"target": x, "loss_fn": nn.MSELoss()}
    return pipepart.profile(model, x, **loss, micro_batches=[4], measure=False, roofline=speed)


def two_hosts(**more: Any) -> Cluster:
    return Cluster.parse(["1GiB"], hosts=2, devices_per_host=2, link="10MB/s", network="1MB/s", **more)


def planned(profile: Profile, cluster: Cluster, **options: Any) -> Plan:
    cut: dict[str, Any] = {"cut_before": ("1", "2", "3")} if len(cluster) == 4 else {"cut_before": ("2",)}
    return pipepart.plan(profile, cluster, schedule="1f1b", **cut, **options)


def rates(plan: Plan) -> list[float]:
    """Bytes per second from each stage to the next one, before compression."""
    links = [
        plan.cluster.link_between(one.device, other.device)
        for one, other in zip(plan.stages, plan.stages[1:], strict=False)
    ]
    return [1 / link.seconds_per_byte if link.seconds_per_byte else 0.0 for link in links]


def test_a_type_alone_is_for_the_links_between_hosts(profile):
    plain, made = planned(profile, two_hosts()), planned(profile, two_hosts(), compress="int8")
    assert made.cluster.compressed == {"network": "int8"}
    left = (WIDTH * 2 + 2 * 4) / (WIDTH * 2 * 4)
    conversion = 0.04e-9
    assert rates(plain) == [1e7, 1e6, 1e7]
    assert rates(made) == pytest.approx([1e7, 1 / (left / 1e6 + conversion), 1e7])
    assert made.predicted.step_seconds < 0.6 * plain.predicted.step_seconds
    assert plain.compressed == ""


def test_a_type_alone_is_for_all_links_of_one_host(profile):
    cluster = Cluster.virtual(2, link="1MB/s", latency=1e-3)
    made = planned(profile, cluster, compress="bf16")
    assert made.cluster.compressed == {"link": "bf16"}
    assert rates(made) == pytest.approx([1 / (0.5 / 1e6 + 0.2e-9)])


def test_links_are_chosen_by_tier(profile):
    own = PairLink(between=("device:1", "device:2"), bandwidth=1e5)
    cluster = two_hosts().model_copy(update={"links": (own,)})
    made = planned(profile, cluster, compress={"network": "int8", "link": "bf16"})
    pairs = ("device:0", "device:1"), ("device:1", "device:2"), ("device:0", "device:3")
    found = [made.cluster.link_between(*pair).compress for pair in pairs]
    assert [one and one.dtype for one in found] == ["bf16", "int8", "int8"]
    assert made.compressed.startswith("activations and gradients as bf16 and int8")


def test_sums_over_replicas_are_not_compressed(profile):
    options: dict[str, Any] = {"cut_before": ("2",), "replicas": 2, "schedule": "1f1b"}
    kinds: list[Any] = ["bf16", {"link": "int8", "network": "int8"}]
    for compress in kinds:
        made = pipepart.plan(profile, two_hosts(), compress=compress, **options)
        as_is = made.model_copy(update={"cluster": two_hosts()}).predict()
        assert made.stage_costs().reduce_grad == as_is.stage_costs().reduce_grad != ()


def test_half_precision_has_nothing_to_gain_from_bf16(profile):
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)]).bfloat16()
    x = torch.randn(8, WIDTH).bfloat16()
    half = pipepart.profile(model, x, target=x, loss_fn=nn.MSELoss(), micro_batches=[4], seconds=0.0)
    cases: list[tuple[Any, float]] = [("bf16", 1.0), ("int8", (1 + 4 / 256) / 2)]
    for compress, left in cases:
        link = pipepart.plan(half, Cluster.virtual(2), compress=compress).cluster.link
        assert link.compress is not None
        assert link.compress.bytes_left == left


def test_a_plan_without_it_takes_it_from_the_links(profile):
    made = planned(profile, Cluster.virtual(2, link="1MB/s"), compress="int8")
    assert replan(made, made.simulate(), compress=None).cluster.compressed == {}
    assert planned(profile, made.cluster).cluster.compressed == {}
