"""FSDP2 within stages gives the bits of pipepart's replicas, and reduces once a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from tests.inside_stage.cases import (
    Layout,
    assert_near_plain,
    blocks,
    reloaded,
    reshard,
    shard,
    shard_in_bfloat16,
    sometimes,
    trained,
)
from tests.support.ranks import assert_same_bits, ranks

FSDP = Layout(shard, replicas=2)


def assert_as_replicas(
    layout: Layout, make: Callable[[], nn.Module] = blocks, sizes: Sequence[int] = (8, 8)
) -> None:
    """Equal to the bit, as gradients of two replicas have one sum; but the norm of shards rounds by itself."""
    found = ranks(4).run(trained, make, layout, sizes, None, 1e3)
    wanted = ranks(4).run(trained, make, layout._replace(parallelize=None), sizes, None, 1e3)
    for rank, (one, other) in enumerate(zip(found, wanted, strict=True)):
        torch.testing.assert_close(one.pop("norms"), other.pop("norms"), rtol=1e-15, atol=0)
        assert one.pop("sharded")
        assert not other.pop("sharded")
        assert_same_bits(one, other, f"rank {rank}")


def test_gradients_losses_norms_and_states_are_those_of_replicas():
    assert_as_replicas(FSDP, sizes=(8, 3, 1))  # of 4, 3 and 1 micro-batches


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        FSDP._replace(schedule="zb-h1", micro_batches=5),
        FSDP._replace(schedule="gpipe"),
        FSDP._replace(schedule="interleaved-1f1b", chunks=2, borders=(2, 4, 6)),
        FSDP._replace(recompute="always"),
        FSDP._replace(parallelize=reshard),
        FSDP._replace(parallelize=reshard, schedule="zb-h1"),
        FSDP._replace(parallelize=reshard, recompute="always"),
    ],
)
def test_so_are_those_of_other_schedules_and_of_units_that_gather_for_each_micro_batch(layout: Layout):
    assert_as_replicas(layout, sizes=(8, 8) if layout.parallelize is reshard else (10, 3))


@pytest.mark.slow
def test_a_unit_that_one_replica_does_not_use_is_reduced_on_both():
    assert_as_replicas(FSDP._replace(borders=(2,), schedule="zb-h1"), sometimes)


@pytest.mark.slow
def test_a_split_backward_adds_up_in_the_dtype_of_the_reduction():
    layout = FSDP._replace(parallelize=shard_in_bfloat16)
    for sizes in ((8, 8), (2,)):  # also of one micro-batch a replica
        found = ranks(4).run(trained, blocks, layout._replace(schedule="zb-h1"), sizes)
        assert_same_bits(found, ranks(4).run(trained, blocks, layout, sizes), "zb-h1 and 1f1b")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(shard, borders=(2, 4, 6)), Layout(shard, replicas=4, borders=())])
def test_one_and_four_replicas_train_as_the_plain_model(layout: Layout):
    assert_near_plain(ranks(4).run(trained, blocks, layout))


@pytest.mark.slow
def test_whole_values_and_shards_are_loaded():
    for found in ranks(4).run(reloaded, FSDP):
        for name, value in blocks().state_dict().items():
            assert found["plus"][name].equal(value + 1)
            assert found["twice"][name].equal((value + 1) * 2)
