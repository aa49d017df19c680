"""Tensor parallelism within stages, alone and with FSDP2: the numbers of the plain model, equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from pipepart.runtime.stage_run import StageRun
from tests.inside_stage.cases import (
    Layout,
    assert_near_plain,
    automatic,
    batches,
    blocks,
    pipeline,
    split,
    split_and_shard,
    trained,
)
from tests.support.ranks import ranks

TENSOR = Layout(split, tensor=2)


def run(layout: Layout) -> list[dict[str, Any]]:
    found = ranks(4).run(trained, blocks, layout)
    assert all(one["sharded"] for one in found)
    return found


def test_two_stages_of_two_ranks_train_as_the_plain_model():
    assert_near_plain(run(TENSOR))


BOTH = Layout(split_and_shard, tensor=2, replicas=2)


@pytest.mark.parametrize("layout", [TENSOR, pytest.param(BOTH, marks=pytest.mark.slow)])
def test_auto_plans_for_tensor_parallelism_and_shards(layout: Layout):
    assert_near_plain(ranks(4).run(partial(trained, make_pipeline=automatic), blocks, layout))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        TENSOR._replace(schedule="zb-h1"),
        TENSOR._replace(schedule="interleaved-1f1b", chunks=2, borders=(2, 4, 6)),
        TENSOR._replace(recompute="always"),
        Layout(split, tensor=4, borders=()),
        Layout(split, replicas=2, tensor=2, borders=(), micro_batches=3),
        Layout(split_and_shard, tensor=2, schedule="zb-h1"),
        Layout(split_and_shard, replicas=2, tensor=2, borders=(), micro_batches=5),
    ],
)
def test_so_do_other_layouts(layout: Layout):
    assert_near_plain(run(layout))


def deferred() -> list[int]:
    """How many weights W computes by itself, for each micro-batch of this rank's stage."""
    found: list[int] = []
    before = StageRun.backward_weights

    def counted(run: StageRun, micro_batch: int, _: None = None) -> None:
        found.append(len(run.deferred[micro_batch]))
        before(run, micro_batch)

    StageRun.backward_weights = counted  # type: ignore[method-assign]
    try:
        with pipeline(blocks(), TENSOR._replace(schedule="zb-h1")) as pipe:
            x, y = batches((8,))[0]
            pipe.step(x, target=y)
    finally:
        StageRun.backward_weights = before  # type: ignore[method-assign]
    return found


@pytest.mark.slow
def test_gradients_of_sharded_weights_are_computed_apart():
    assert ranks(4).run(deferred) == [[5, 5, 5, 5]] * 4  # of a Linear and of two in each of two blocks


def meshes() -> tuple[Any, ...]:
    seen: list[Any] = []

    def parallelize(layers: Any, mesh: DeviceMesh) -> None:
        seen.append((list(layers), mesh.mesh_dim_names, mesh.mesh.tolist()))
        with pytest.raises(TypeError):
            layers["0"] = torch.nn.Identity()

    layout = Layout(parallelize, tensor=2)
    with pipeline(blocks(), layout) as pipe:
        assert pipe.mesh is not None
        return (*seen, pipe.mesh.mesh_dim_names, pipe.mesh.mesh.tolist())


@pytest.mark.slow
def test_the_function_gets_the_layers_of_the_rank_and_the_mesh_of_its_stage():
    found = ranks(4).run(meshes)
    first, second = ["0", "1", "2", "3"], ["4.0", "4.1", "4.2", "4.3"]
    everywhere = ("dp", "pp", "tp"), [[[0, 1], [2, 3]]]
    for rank, (names, of_mesh) in enumerate([(first, [[0, 1]])] * 2 + [(second, [[2, 3]])] * 2):
        assert found[rank] == ((names, ("dp", "tp"), of_mesh), *everywhere)


def drawing(layouts: Sequence[Layout]) -> list[Any]:
    """Losses of a model with dropout between the blocks."""
    found = []
    for layout in layouts:
        model = blocks()
        model[2].p = model[4][2].p = 0.3  # type: ignore[union-attr, index]
        torch.manual_seed(5)
        with pipeline(model, layout) as pipe:
            found.append([pipe.step(x, target=y) for x, y in batches((8, 8))])
    return found


@pytest.mark.slow
def test_draws_beside_what_is_sharded_are_those_of_the_model_without():
    for split_up, whole in ranks(4).run(drawing, [TENSOR, Layout(borders=(2, 4, 6))]):
        torch.testing.assert_close(split_up, whole, rtol=1e-12, atol=0)
