"""What cannot be parallelized within a stage is refused with a sentence, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.inside_stage import cases
from tests.inside_stage.cases import Layout
from tests.support.ranks import ranks

FSDP, TENSOR = Layout(cases.shard, replicas=2), Layout(cases.split, tensor=2)


def test_one_process_is_refused():
    for make, count in ((cases.pipeline, 4), (cases.automatic, 2)):
        with pytest.raises(ValueError, match=f"this is one: start torchrun --nproc-per-node {count}"):
            make(cases.blocks(), FSDP)


def test_a_plan_of_groups_of_devices_needs_the_function():
    for make in (cases.pipeline, cases.automatic):
        with pytest.raises(
            ValueError, match=r"tensor=2 needs the function .* pass parallelize=f to the Pipeline"
        ):
            make(cases.blocks(), TENSOR._replace(parallelize=None))


def of_the_world(layers: Any, mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(layers[next(iter(layers))])


def of_several_layers(layers: Any, mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard([layer for layer in layers.values() if isinstance(layer, cases.Block)], mesh=mesh["dp"])


def offloading(layers: Any, mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    cases.shard(layers, mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))


def replacing(layers: Any, mesh: DeviceMesh) -> None:
    for layer in layers.values():
        if isinstance(layer, cases.Block):
            layer.up = nn.Sequential(layer.up)  # type: ignore[assignment]


def raising(layers: Any, mesh: DeviceMesh) -> None:
    cases.shard(layers, mesh)
    raise OSError("no such rule")


def tied() -> nn.Module:
    """A weight of two blocks of one stage."""
    model = cases.blocks()
    model[1].up.weight = model[3].up.weight  # type: ignore[union-attr]
    return model


def tied_over_stages() -> nn.Module:
    model = cases.blocks()
    model[1].up.weight = model[4][1].up.weight  # type: ignore[union-attr, index]
    return model


def with_hook() -> nn.Module:
    model = cases.blocks()
    for layer in (model[1], model[4][1]):  # type: ignore[index]
        layer.up.weight.register_hook(lambda gradient: gradient)  # type: ignore[union-attr]
    return model


def trained(make: Callable[[], nn.Module], layout: Layout, options: dict[str, Any]) -> None:
    with cases.pipeline(make(), layout, **options) as pipe:
        for x, y in cases.batches((8, 3)):
            pipe.step(x, target=y)


FOUR = Layout(cases.shard, borders=(2, 4, 6))
MODELS: dict[Callable[[], nn.Module], str] = {
    tied: "is tied to '3.up.weight', and parallelize has made two parameters of it",
    tied_over_stages: "is used by stages on ranks 0, 1, and a parameter of several stages cannot be",
    with_hook: "has a hook, which is lost when the parameter is sharded",
}
FUNCTIONS: dict[Any, str] = {
    3: "parallelize must be a function",
    of_the_world: "is sharded over the ranks [0, 1, 2, 3]",
    of_several_layers: "by one call of fully_shard with modules beside it",
    offloading: "has its parameters on the host between two actions",
    replacing: "parallelize has replaced module 'up' of layer",
    cases.reshard: "3 micro-batches are not equally many for each of 2 replicas",
    raising: "no such rule",
}
LAYOUTS: dict[Layout, str] = {
    FOUR._replace(schedule="pipedream"): "schedule 'pipedream' is asynchronous",
    FOUR._replace(offload="stash"): "keeps the stash of a stage on the host",
    FOUR._replace(borders=tuple(range(1, 8))): "drives 2 devices of the plan, and under parallel",
    TENSOR._replace(borders=()): "with tensor=2 for 2 devices, each of which needs a process",
}
OPTIONS: dict[str, Any] = {"optimizer": torch.optim.SGD, "compile": True, "strict": True}


@pytest.mark.parametrize(
    ("make", "layout", "options", "words"),
    [
        *((make, FSDP, {}, words) for make, words in MODELS.items()),
        *(
            (cases.blocks, FSDP._replace(parallelize=function), {}, words)
            for function, words in FUNCTIONS.items()
        ),
        *((cases.blocks, layout, {}, words) for layout, words in LAYOUTS.items()),
        *(
            (cases.blocks, FSDP, {name: value}, f"{name}= cannot be combined with parallelize=")
            for name, value in OPTIONS.items()
        ),
    ],
)
@pytest.mark.slow
def test_refusals_are_raised_on_all_ranks(
    make: Callable[[], nn.Module], layout: Layout, options: dict[str, Any], words: str
):
    for one in ranks(4).outcomes(trained, make, layout, options):
        assert isinstance(one.error, ValueError | TypeError | RuntimeError | OSError)
        assert words in str(one.error), one.traceback
