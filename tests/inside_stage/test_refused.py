"""What cannot be parallelized within a stage is refused with a sentence, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.inside_stage.cases import (
    Block,
    Layout,
    automatic,
    batches,
    blocks,
    pipeline,
    reshard,
    shard,
    split,
)
from tests.support.ranks import ranks

FSDP, TENSOR = Layout(shard, replicas=2), Layout(split, tensor=2)


def test_one_process_is_refused():
    for make, count in ((pipeline, 4), (automatic, 2)):
        with pytest.raises(ValueError, match=f"this is one: start torchrun --nproc-per-node {count}"):
            make(blocks(), FSDP)


def test_a_plan_of_groups_of_devices_needs_the_function():
    for make in (pipeline, automatic):
        with pytest.raises(
            ValueError, match=r"tensor=2 needs the function .* pass parallelize=f to the Pipeline"
        ):
            make(blocks(), TENSOR._replace(parallelize=None))


def of_the_world(layers: Any, mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(layers[next(iter(layers))])


def of_several_layers(layers: Any, mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard([layer for layer in layers.values() if isinstance(layer, Block)], mesh=mesh["dp"])


def offloading(layers: Any, mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    shard(layers, mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))


def replacing(layers: Any, mesh: DeviceMesh) -> None:
    for layer in layers.values():
        if isinstance(layer, Block):
            layer.up = nn.Sequential(layer.up)  # type: ignore[assignment]


def raising(layers: Any, mesh: DeviceMesh) -> None:
    shard(layers, mesh)
    raise OSError("no such rule")


def tied() -> nn.Module:
    """A weight of two blocks of one stage."""
    model = blocks()
    model[1].up.weight = model[3].up.weight  # type: ignore[union-attr]
    return model


def tied_over_stages() -> nn.Module:
    model = blocks()
    model[1].up.weight = model[4][1].up.weight  # type: ignore[union-attr, index]
    return model


def with_hook() -> nn.Module:
    model = blocks()
    for layer in (model[1], model[4][1]):  # type: ignore[index]
        layer.up.weight.register_hook(lambda gradient: gradient)  # type: ignore[union-attr]
    return model


def trained(make: Callable[[], nn.Module], layout: Layout, options: dict[str, Any]) -> None:
    with pipeline(make(), layout, **options) as pipe:
        for x, y in batches((8, 3)):
            pipe.step(x, target=y)


@pytest.mark.parametrize(
    ("make", "layout", "options", "words"),
    [
        (blocks, FSDP._replace(parallelize=3), {}, "parallelize must be a function"),
        (blocks, FSDP, {"optimizer": torch.optim.SGD}, "optimizer= cannot be combined with parallelize="),
        (blocks, FSDP, {"compile": True}, "compile= cannot be combined with parallelize="),
        (blocks, FSDP, {"strict": True}, "strict= cannot be combined with parallelize="),
        (
            blocks,
            Layout(shard, schedule="pipedream", borders=(2, 4, 6)),
            {},
            "schedule 'pipedream' is asynchronous",
        ),
        (
            blocks,
            Layout(shard, offload="stash", borders=(2, 4, 6)),
            {},
            "keeps the stash of a stage on the host",
        ),
        (
            blocks,
            Layout(shard, borders=(1, 2, 3, 4, 5, 6, 7)),
            {},
            "drives 2 devices of the plan, and under parallel",
        ),
        (
            blocks,
            TENSOR._replace(borders=()),
            {},
            "with tensor=2 for 2 devices, each of which needs a process",
        ),
        (tied, FSDP, {}, "is tied to '{other}', and parallelize has made two parameters of it"),
        (
            tied_over_stages,
            FSDP,
            {},
            "is used by stages on ranks 0, 1, and a parameter of several stages cannot be",
        ),
        (with_hook, FSDP, {}, "has a hook, which is lost when the parameter is sharded"),
        (blocks, FSDP._replace(parallelize=of_the_world), {}, "is sharded over the ranks [0, 1, 2, 3]"),
        (
            blocks,
            FSDP._replace(parallelize=of_several_layers),
            {},
            "by one call of fully_shard with modules beside it",
        ),
        (
            blocks,
            FSDP._replace(parallelize=offloading),
            {},
            "has its parameters on the host between two actions",
        ),
        (blocks, FSDP._replace(parallelize=replacing), {}, "parallelize has replaced module 'up' of layer"),
        (
            blocks,
            FSDP._replace(parallelize=reshard),
            {},
            "3 micro-batches are not equally many for each of 2 replicas",
        ),
        (blocks, FSDP._replace(parallelize=raising), {}, "no such rule"),
    ],
)
@pytest.mark.slow
def test_refusals_are_raised_on_all_ranks(
    make: Callable[[], nn.Module], layout: Layout, options: dict[str, Any], words: str
):
    for one in ranks(4).outcomes(trained, make, layout, options):
        assert isinstance(one.error, ValueError | TypeError | RuntimeError | OSError)
        assert words.replace("{other}", "3.up.weight") in str(one.error), one.traceback
