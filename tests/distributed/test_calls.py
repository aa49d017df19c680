"""Under torchrun calls that ranks do not make alike are refused on all of them, and the pipeline stays usable."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pipepart
from pipepart import Pipeline
from pipepart.ranks import under_torchrun
from tests.distributed.training import TIMEOUT, adam, drawn_batches, gradients, trained
from tests.support.chains import cut_by_hand, plan_by_hand
from tests.support.pieces import linear
from tests.support.ranks import Own, assert_as_in_one_process, ranks


def rank() -> int:
    return int(os.environ.get("RANK", "0")) if under_torchrun() else 0


def small(**options: Any) -> Pipeline:
    layers = [nn.Sequential(linear(), nn.Dropout(0.1)) for _ in range(4)]
    return cut_by_hand(
        nn.Sequential(*layers).double(), [1, 2], loss_fn=nn.MSELoss(), timeout=TIMEOUT, **options
    )


Call = Callable[[Pipeline, int, Any, Any], Any]

X, Y = drawn_batches([6])[0]


def _wrong_argument(pipe: Pipeline, rank: int, x: Any, y: Any) -> Any:
    return pipe.step(x, target=y, **({"unknown": x[:2]} if rank == 1 else {}))


CALLS: dict[str, tuple[Call, str]] = {
    "shapes": (
        lambda pipe, rank, x, y: pipe.step(x[rank:], target=y[rank:]),
        r"differ: \(float64 \[6, .* on rank 0; \(float64 \[5, .* on rank 1; \(float64 \[4, .* on rank 2",
    ),
    "dtype": (
        lambda pipe, rank, x, y: pipe.step(x.float() if rank == 2 else x, target=y),
        r"\(float64 .* on rank 0, 1; \(float32 .* on rank 2\.",
    ),
    "values": (
        lambda pipe, rank, x, y: pipe.step(x + rank, target=y),
        "mini-batches that differ: other values on rank 0 than on rank 1 than on rank 2",
    ),
    "target": (
        lambda pipe, rank, x, y: pipe.step(x, target=y + rank),
        "targets that differ: other values on rank 0",
    ),
    "last has no target": (
        lambda pipe, rank, x, y: pipe.step(x, target=None if rank == 2 else y),
        "rank 2 runs the last stage and was given no target",
    ),
    "argument": (_wrong_argument, "unknown|rank 1 refuses step"),
    "no tensor": (
        lambda pipe, rank, x, y: pipe.step("x" if rank == 0 else x, target=y),
        "the input must hold a tensor",
    ),
    "first has none": (
        lambda pipe, rank, x, y: pipe.step(*([] if rank == 0 else [x]), target=y),
        "rank 0 runs the first stage and was given no mini-batch",
    ),
    "call": (
        lambda pipe, rank, x, y: pipe.evaluate(x, target=y) if rank else pipe.step(x, target=y),
        "rank 1 calls evaluate.*while rank 0 calls step",
    ),
    "options": (
        lambda pipe, rank, x, y: pipe.step(x, target=y, return_outputs=rank == 1),
        "return_outputs=True.*return_outputs=False",
    ),
    "weight": (
        lambda pipe, rank, x, y: pipe.step(x, target=y, loss_weight=1 + rank),
        "loss_weight=2.*loss_weight=1",
    ),
    "norm": (
        lambda pipe, rank, x, y: pipe.clip_grad_norm_(1.0 + rank),
        r"rank 1 calls clip_grad_norm_\(2\.0, 2\.0.*while rank 0 calls clip_grad_norm_\(1\.0, 2\.0",
    ),
    "clip": (
        lambda pipe, rank, x, y: pipe.clip_grad_norm_(1.0) if rank else pipe.step(x, target=y),
        "rank 1 calls clip_grad_norm_.*while rank 0 calls step",
    ),
    "mode": (lambda pipe, rank, x, y: pipe.train(rank != 1).step(x, target=y), "in another mode"),
}


def refused(name: str) -> dict[str, Any]:
    """A step, then a call that is refused, then a step."""
    call, message = CALLS[name]
    with small() as pipe:
        losses = [pipe.step(X, target=Y)]
        before = gradients(pipe)
        if under_torchrun():
            with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
                call(pipe, rank(), X, Y)
            pipe.train()
        assert str(gradients(pipe)) == str(before)
        losses.append(pipe.step(X, target=Y))
        return {"losses": losses, "gradients": gradients(pipe), "generator": torch.get_rng_state()}


@pytest.mark.parametrize("name", CALLS)
def test_what_ranks_do_not_do_alike_is_refused_before_anything_runs(name):
    assert_as_in_one_process(refused, 3, name)


def other_plans() -> None:
    with pytest.raises(ValueError, match="rank 1 has another plan than rank 0"):
        small(micro_batches=3 + rank())


def odd_devices() -> None:
    model = nn.Sequential(linear(), linear(), linear())
    with pytest.raises(ValueError, match="3 devices and torchrun started 2 processes"):
        Pipeline(model, plan_by_hand(list("012"), [1, 2], micro_batches=2), nn.MSELoss())


def emulated() -> None:
    model = nn.Sequential(linear(), linear())
    plan = plan_by_hand(["0", "1"], [1], micro_batches=2)
    slow = plan.model_copy(update={"cluster": pipepart.Cluster.virtual(2, link="1GB/s")})
    with pytest.raises(
        ValueError, match=r"the link between virtual:0 and virtual:1 is emulated.*one process"
    ):
        Pipeline(model, slow, nn.MSELoss())


def fails_on_one() -> None:
    model = nn.Sequential(linear(), linear())
    optimizer: Any = (lambda parameters: None) if rank() else adam
    with pytest.raises((TypeError, RuntimeError), match="return a torch"):
        Pipeline(model, plan_by_hand(["0", "1"], [1], micro_batches=2), nn.MSELoss(), optimizer=optimizer)


def test_a_pipeline_that_cannot_be_made_on_one_rank_is_made_on_none():
    ranks(3).run(other_plans)
    for case in (odd_devices, emulated, fails_on_one):
        ranks(2).run(case)


def without_the_batch(given: tuple[int, ...]) -> dict[str, Any]:
    """Mini-batches of changing shapes, given to some ranks only."""
    found: dict[str, Any] = {"losses": []}
    with small() as pipe:
        optimizer = adam(pipe.parameters())
        for x, y in drawn_batches([6, 6, 3, 6]):
            optimizer.zero_grad()
            has = rank() in given
            found["losses"].append(pipe.step(*([x] if has else []), target=y if has else None))
            optimizer.step()
        found["state"] = pipe.full_state_dict()
    return found


@pytest.mark.parametrize("given", [(0, 2), (0, 1, 2)])
def test_ranks_between_need_no_mini_batch(given):
    assert_as_in_one_process(without_the_batch, 3, given)


def only_what_is_needed() -> dict[str, Any]:
    """The first rank gets the input, which an earlier layer made, and the last one the target."""
    before = linear().double()
    found: dict[str, Any] = {"losses": []}
    alone = not under_torchrun()
    with small() as pipe:
        for x, y in drawn_batches([6, 3]):
            made = [before(x)] if alone or rank() == 0 else []
            found["losses"].append(pipe.step(*made, target=y if alone or rank() == 2 else None))
        found["gradients"] = gradients(pipe)
        own = before.weight.grad if alone or rank() == 0 else None
        found["before"] = Own({} if own is None else {"weight": own})
    return found


def test_the_first_rank_needs_the_input_and_the_last_one_the_target():
    assert_as_in_one_process(only_what_is_needed, 3)


def behind_another_layer() -> dict[str, Any]:
    """Every rank has the layer that makes the input, and two pipelines take turns."""
    before = linear().double()
    found: dict[str, Any] = {"losses": []}
    with small() as one, small(schedule="gpipe") as other:
        for number, (x, y) in enumerate(drawn_batches([6, 3, 6, 5])):
            found["losses"].append((one, other)[number % 2].step(before(x), target=y))
        found["gradients"], found["other"] = gradients(one), gradients(other)
    return {**found, "before": [p.grad for p in before.parameters()]}


def test_layers_before_two_pipelines_get_their_gradients_on_every_rank():
    assert_as_in_one_process(behind_another_layer, 3)


def from_a_loader(shuffled: bool) -> dict[str, Any]:
    data = TensorDataset(*drawn_batches([20])[0])
    loader = DataLoader(data, batch_size=6, shuffle=shuffled, generator=torch.Generator().manual_seed(3))
    with small() as pipe:
        losses = [pipe.step(x, target=y) for x, y in pipe.prefetch(loader)]
        return {"losses": losses, "gradients": gradients(pipe)}


def test_prefetch():
    assert_as_in_one_process(from_a_loader, 3, True)


def loaded() -> dict[str, Any]:
    """The state of one training goes into a second pipeline, with other values and a tied weight."""
    first, second = (nn.Sequential(*[linear() for _ in range(5)]).double() for _ in range(2))
    for model in (first, second):
        model[4].weight = model[0].weight
    found = trained(cut_by_hand(first, [2, 3], loss_fn=nn.MSELoss(), timeout=TIMEOUT), drawn_batches([6]))
    with cut_by_hand(second, [1, 4], loss_fn=nn.MSELoss(), timeout=TIMEOUT) as pipe:
        pipe.load_state_dict(found["state"])
        with pytest.raises(RuntimeError, match="Unexpected key"):
            pipe.load_state_dict({**found["state"], "other": X})
        loss = pipe.step(X, target=Y)
        return {"loss": loss, "state": pipe.full_state_dict(), "own": Own(pipe.state_dict())}


def test_a_state_dict_of_the_whole_model_is_loaded():
    assert_as_in_one_process(loaded, 3)


def _wrong_state(pipe: Pipeline) -> None:
    """Of another shape on rank 0, for a layer of its own."""
    state = pipe.full_state_dict()
    pipe.load_state_dict({**state, next(iter(state)): torch.zeros(1)} if rank() == 0 else state)


REFUSED: dict[str, tuple[Callable[[Pipeline], Any], str]] = {
    "state": (_wrong_state, "size mismatch|rank 0 refuses load_state_dict"),
    "key": (
        lambda pipe: pipe.load_state_dict({**pipe.full_state_dict(), **({"other": X} if rank() else {})}),
        "Unexpected key|rank 1 refuses load_state_dict",
    ),
    "no number": (
        lambda pipe: pipe.clip_grad_norm_(cast(Any, "x") if rank() else 1.0),
        "could not convert|refuses|calls",
    ),
    "call": (
        lambda pipe: pipe.full_state_dict() if rank() else pipe.clip_grad_norm_(1.0),
        "rank 1 calls full_state_dict.*while rank 0 calls clip_grad_norm_",
    ),
}


def refused_state(name: str) -> None:
    call, message = REFUSED[name]
    with small() as pipe:
        pipe.step(X, target=Y)
        with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
            call(pipe)
        pipe.step(X, target=Y)


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_rank_cannot_load_or_clip_is_refused_on_all(name):
    ranks(3).run(refused_state, name)


def planned_here() -> dict[str, Any]:
    """Plans on rank 0 with the measured links of all ranks."""
    model = nn.Sequential(*[linear() for _ in range(6)]).double()
    with Pipeline.auto(model, X, target=Y, loss_fn=nn.MSELoss(), devices=None, timeout=60) as pipe:
        plan = pipe.plan
        loss, after = pipe.step(X, target=Y), pipe.full_state_dict()
    return {"plan": plan.model_dump_json(), "loss": loss, "state": after}


def test_auto_plans_once_for_all_ranks():
    found = ranks(2).run(planned_here)
    assert found[0]["plan"] == found[1]["plan"]
    assert found[0]["loss"].equal(found[1]["loss"])
    plan = pipepart.Plan.model_validate_json(found[0]["plan"])
    assert len(plan.workers) == len(plan.cluster) == 2
    torch.manual_seed(0)
    model = nn.Sequential(*[linear() for _ in range(6)]).double()
    with Pipeline(model, plan, nn.MSELoss()) as pipe:
        assert pipe.step(X, target=Y).equal(found[0]["loss"])
