"""FSDP2 and tensor parallelism within stages: the numbers of replicas or of the plain model, in any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import pipepart
from pipepart.runtime.stage_run import StageRun
from tests.inside_stage import cases
from tests.inside_stage.cases import Layout
from tests.support import plain
from tests.support.ranks import assert_same_bits, ranks

FSDP = Layout(cases.shard, replicas=2)


def assert_as_replicas(
    layout: Layout, make: Callable[[], nn.Module] = cases.blocks, sizes: Sequence[int] = (8, 8)
) -> None:
    """Equal to the bit, as gradients of two replicas have one sum; but the norm of shards rounds by itself."""
    found = ranks(4).run(cases.trained, make, layout, sizes, None, 1e3)
    wanted = ranks(4).run(cases.trained, make, layout._replace(parallelize=None), sizes, None, 1e3)
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
        FSDP._replace(parallelize=cases.reshard),
        FSDP._replace(parallelize=cases.reshard, schedule="zb-h1"),
        FSDP._replace(parallelize=cases.reshard, recompute="always"),
    ],
)
def test_so_are_those_of_other_schedules_and_of_units_that_gather_for_each_micro_batch(layout: Layout):
    assert_as_replicas(layout, sizes=(8, 8) if layout.parallelize is cases.reshard else (10, 3))


@pytest.mark.slow
def test_a_unit_that_one_replica_does_not_use_is_reduced_on_both():
    assert_as_replicas(FSDP._replace(borders=(2,), schedule="zb-h1"), cases.sometimes)


@pytest.mark.slow
def test_a_split_backward_adds_up_in_the_dtype_of_the_reduction():
    layout = FSDP._replace(parallelize=cases.shard_in_bfloat16)
    for sizes in ((8, 8), (2,)):  # also of one micro-batch a replica
        found = ranks(4).run(cases.trained, cases.blocks, layout._replace(schedule="zb-h1"), sizes)
        assert_same_bits(found, ranks(4).run(cases.trained, cases.blocks, layout, sizes), "zb-h1 and 1f1b")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [Layout(cases.shard, borders=(2, 4, 6)), Layout(cases.shard, replicas=4, borders=())],
)
def test_one_and_four_replicas_train_as_the_plain_model(layout: Layout):
    cases.assert_near_plain(ranks(4).run(cases.trained, cases.blocks, layout))


@pytest.mark.slow
def test_whole_values_and_shards_are_loaded():
    for found in ranks(4).run(cases.reloaded, FSDP):
        for name, value in cases.blocks().state_dict().items():
            assert found["plus"][name].equal(value + 1)
            assert found["twice"][name].equal((value + 1) * 2)


SPLIT = Layout(cases.split, tensor=2)


def run_split(layout: Layout) -> list[dict[str, Any]]:
    found = ranks(4).run(cases.trained, cases.blocks, layout)
    assert all(one["sharded"] for one in found)
    return found


def test_two_stages_of_two_ranks_train_as_the_plain_model():
    cases.assert_near_plain(run_split(SPLIT))


BOTH = Layout(cases.split_and_shard, tensor=2, replicas=2)


@pytest.mark.parametrize("layout", [SPLIT, pytest.param(BOTH, marks=pytest.mark.slow)])
def test_auto_plans_for_tensor_parallelism_and_shards(layout: Layout):
    cases.assert_near_plain(
        ranks(4).run(partial(cases.trained, make_pipeline=cases.automatic), cases.blocks, layout)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        SPLIT._replace(schedule="zb-h1"),
        SPLIT._replace(schedule="interleaved-1f1b", chunks=2, borders=(2, 4, 6)),
        SPLIT._replace(recompute="always"),
        Layout(cases.split, tensor=4, borders=()),
        Layout(cases.split, replicas=2, tensor=2, borders=(), micro_batches=3),
        Layout(cases.split_and_shard, tensor=2, schedule="zb-h1"),
        Layout(cases.split_and_shard, replicas=2, tensor=2, borders=(), micro_batches=5),
    ],
)
def test_so_do_other_layouts(layout: Layout):
    cases.assert_near_plain(run_split(layout))


def deferred() -> list[int]:
    """How many weights W computes by itself, for each micro-batch of this rank's stage."""
    found: list[int] = []
    before = StageRun.backward_weights

    def counted(run_split: StageRun, micro_batch: int, _: None = None) -> None:
        found.append(len(run_split.deferred[micro_batch]))
        before(run_split, micro_batch)

    StageRun.backward_weights = counted  # type: ignore[method-assign]
    try:
        with cases.pipeline(cases.blocks(), SPLIT._replace(schedule="zb-h1")) as pipe:
            x, y = cases.batches((8,))[0]
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
    with cases.pipeline(cases.blocks(), layout) as pipe:
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
        model = cases.blocks()
        model[2].p = model[4][2].p = 0.3  # type: ignore[union-attr, index]
        torch.manual_seed(5)
        with cases.pipeline(model, layout) as pipe:
            found.append([pipe.step(x, target=y) for x, y in cases.batches((8, 8))])
    return found


@pytest.mark.slow
def test_draws_beside_what_is_sharded_are_those_of_the_model_without():
    for split_up, whole in ranks(4).run(drawing, [SPLIT, Layout(borders=(2, 4, 6))]):
        torch.testing.assert_close(split_up, whole, rtol=1e-12, atol=0)


def towers(tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return cases.Towers(tied).double()


def shard_all(layers: Mapping[str, nn.Module], mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    for layer in layers.values():
        fully_shard(layer, mesh=mesh["dp"])


def plan_for(layout: Layout, tied: bool) -> pipepart.Plan:
    x, y = cases.batches((8,))[0]
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "tied"),
    [
        (Layout(cases.shard, replicas=2), True),
        (Layout(shard_all, replicas=2, schedule="zb-h1"), False),
        (Layout(cases.split, tensor=2), False),
    ],
)
def test_a_model_that_is_no_sequential(layout: Layout, tied: bool):
    make = partial(towers, tied)
    found = ranks(4).run(cases.trained, make, layout, (8, 8), plan_for(layout, tied))
    assert all(one["sharded"] for one in found)
    cases.assert_near_plain(found, make, plan_for(Layout(), tied))


@pytest.mark.slow
def test_a_parameter_of_two_stages_is_not_sharded():
    layout = Layout(shard_all, replicas=2)
    for one in ranks(4).outcomes(cases.trained, partial(towers, True), layout, (8,), plan_for(layout, True)):
        assert isinstance(one.error, ValueError)
        assert "is used by stages on ranks 0, 2, and a parameter of several stages cannot be sharded" in str(
            one.error
        )


LAYOUTS = {
    "four stages": Layout(borders=(2, 4, 6)),
    "four stages, sharded alone": Layout(cases.shard, borders=(2, 4, 6)),
    "sharded over two": Layout(cases.shard, replicas=2),
    "sharded over four": Layout(cases.shard, replicas=4, borders=()),
    "split": Layout(cases.split, tensor=2),
    "split and sharded": Layout(cases.split_and_shard, replicas=2, tensor=2, borders=()),
}


@pytest.mark.slow
def test_any_layout_loads_what_any_other_saves(tmp_path: Path):
    names = list(LAYOUTS)
    first = {name: ranks(4).run(cases.resumed, LAYOUTS[name], None, tmp_path / name) for name in names}
    expected = ranks(4).run(cases.resumed, LAYOUTS[names[0]], tmp_path / names[0], None)[0]
    for name, following in zip(names, [*names[1:], names[0]], strict=True):
        for one in first[name]:
            plain.assert_close(one["state"], first[names[0]][0]["state"], 1e-10)
        for one in ranks(4).run(cases.resumed, LAYOUTS[following], tmp_path / name, None):
            plain.assert_near(torch.stack(one["losses"]), torch.stack(expected["losses"]), 1e-10, name)
            plain.assert_close(one["state"], expected["state"], 1e-10)


@pytest.mark.slow
def test_a_plain_module_loads_what_was_split_and_sharded(tmp_path: Path):
    saved = ranks(4).run(cases.resumed, LAYOUTS["split and sharded"], None, tmp_path)[0]["state"]
    model = cases.blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
    pipepart.load(tmp_path, model, optimizer)
    for name, value in model.state_dict().items():
        assert value.equal(saved[name]), name
    for parameter in model.parameters():
        assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape
