"""Recorded models are recorded as they were before their layers were parallelized."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import pipepart
from tests.inside_stage.cases import Layout, Towers, assert_near_plain, batches, shard, split, trained
from tests.support.ranks import ranks

pytestmark = pytest.mark.slow


def towers(tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Towers(tied).double()


def shard_all(layers: Mapping[str, nn.Module], mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    for layer in layers.values():
        fully_shard(layer, mesh=mesh["dp"])


def plan_for(layout: Layout, tied: bool) -> pipepart.Plan:
    x, y = batches((8,))[0]
    profile = pipepart.profile(towers(tied), x, loss_fn=nn.MSELoss(), target=y, micro_batches=4)
    cluster = pipepart.Cluster.virtual(4, threads=1)
    how = {
        "cut_before": ["blocks.2"],
        "replicas": layout.replicas,
        "tensor": layout.tensor,
        "schedule": layout.schedule,
    }
    how |= {"allow_split_ties": tied}
    return pipepart.plan(profile, cluster, micro_batches=4, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "tied"),
    [
        (Layout(shard, replicas=2), True),
        (Layout(shard_all, replicas=2, schedule="zb-h1"), False),
        (Layout(split, tensor=2), False),
    ],
)
def test_a_model_that_is_no_sequential(layout: Layout, tied: bool):
    make = partial(towers, tied)
    found = ranks(4).run(trained, make, layout, (8, 8), plan_for(layout, tied))
    assert all(one["sharded"] for one in found)
    assert_near_plain(found, make, plan_for(Layout(), tied))


def test_a_parameter_of_two_stages_is_not_sharded():
    layout = Layout(shard_all, replicas=2)
    for one in ranks(4).outcomes(trained, partial(towers, True), layout, (8,), plan_for(layout, True)):
        assert isinstance(one.error, ValueError)
        assert "is used by stages on ranks 0, 2, and a parameter of several stages cannot be sharded" in str(
            one.error
        )
