"""``pipepart.check`` on correct models: its report, and the state that it must not change."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipepart
from pipepart import CheckReport
from tests.support import plain
from tests.support.chains import plan_by_hand
from tests.support.two_parts import Calls
from tests.verify import faults

pytestmark = pytest.mark.usefixtures("short_profiles")


def checked(model: nn.Module, **options: Any) -> CheckReport:
    """Two steps on two devices, in both dtypes."""
    return faults.checked(model, **{"dtypes": ["float64", "own"]} | options)


def test_every_schedule_is_the_same_bit_for_bit_in_both_dtypes() -> None:
    report = checked(faults.chain())
    assert [(row.schedule, row.dtype) for row in report.rows] == [
        (schedule, dtype) for dtype in ("float64", "float32") for schedule in ("gpipe", "1f1b", "zb-h1")
    ]
    assert all(row.same and row.ok and not row.layer for row in report.rows)
    assert all(row.buffers is None for row in report.rows)
    assert max(row.mini_batch or 0 for row in report.rows if row.dtype == "float64") < 1e-14
    report.raise_if_different()


def kept(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A sum and a count."""
    counts = (target != 0).to(output.dtype)
    return (F.cross_entropy(output, target, reduction="none") * counts).sum(), counts.sum()


def squared(output: Tensor, target: Tensor) -> Tensor:
    """Writes into the output."""
    return output.sub_(target[:, None]).square().mean()


def by_turns(pair: tuple[Tensor, Tensor], most: int) -> list[tuple[Tensor, Tensor]]:
    x, y = pair
    return [(x[start::most], y[start::most]) for start in range(most)]


def balanced(x: Tensor, inner: nn.Module) -> Tensor:
    """Adds a loss of its own, as a mixture of experts does."""
    pipepart.add_loss((made := inner(x)).square().mean())
    return made


class Holds(nn.Module):
    """Holds a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


MASK = torch.tensor([1.0, 0, 1, 1, 0, 1])
RIGHT: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "a sum and a count": (faults.chain, {"loss_fn": kept}),
    "a loss that writes into the output": (faults.chain, {"loss_fn": squared}),
    "the same, of one micro-batch": (faults.chain, {"loss_fn": squared, "micro_batches": 1}),
    "losses that layers add": (
        lambda: faults.chain(*(Calls(balanced, inner=nn.Linear(8, 8)) for _ in range(2))),
        {"dtypes": ["float64"]},
    ),
    "a tensor that goes whole to every micro-batch": (
        lambda: nn.Sequential(
            Calls(lambda given, inner: inner(given["x"] * given["mask"]), inner=nn.Linear(6, 3)), nn.Tanh()
        ),
        {"sample": ({"x": faults.batch()[0], "mask": pipepart.Whole(MASK)},)},
    ),
    "micro-batches of one's own": (faults.chain, {"split": by_turns, "micro_batches": 5}),
    "nothing to train": (lambda: faults.chain().requires_grad_(False), {}),
    "a sparse buffer": (
        lambda: faults.chain(
            Calls(
                lambda x, graph: torch.sparse.mm(graph, x.t()).t(), graph=nn.Buffer(torch.eye(8).to_sparse())
            )
        ),
        {},
    ),
    "NaN in a buffer": (
        lambda: faults.chain(
            Calls(lambda x, scales: x * scales[0], scales=nn.Buffer(torch.tensor([1.0, torch.nan])))
        ),
        {},
    ),
    "strict devices": (faults.chain, {"strict": True}),
    "a tensor of a layer": (lambda: faults.chain(Holds()), {"dtypes": ["own"]}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_numbers_are_those_of_the_micro_batches_and_of_the_mini_batch(name: str) -> None:
    make, options = RIGHT[name]
    report = checked(make(), schedules=["1f1b", "zb-h1"][: 1 + (name == "a sum and a count")], **options)
    assert report.micro_batches == options.get("micro_batches", 4)
    for row in report.rows:
        assert row.same
        assert row.ok
        assert (row.gradients is None) == (name == "nothing to train")
        assert (row.mini_batch is None) == ("split" in options)
        assert (row.mini_batch or 0) < (1e-14 if row.dtype == "float64" else 1e-6)


def test_strict_devices_raise_what_accelerators_would() -> None:
    with pytest.raises(RuntimeError, match="attribute 'mask' of layer '2'"):
        checked(faults.chain(Holds()), dtypes=["own"], strict=True, schedules=["1f1b"])


def jump(x: Tensor) -> Tensor:
    """Makes much of rounding: its slope is another one on either side of a border that numbers lie on."""
    return x * torch.where(x.detach() * 1e8 % 2 < 1, 1.0, 2.0).to(x)


def test_rounding_is_not_carried_on_from_step_to_step() -> None:
    """Ten steps of a model that would end anywhere, had it begun a little beside."""
    layers = (layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh(), Calls(jump)))
    given: dict[str, Any] = {"schedules": ["chimera"], "micro_batches": 4, "steps": 10, "dtypes": ["own"]}
    (row,) = checked(nn.Sequential(*layers, nn.Linear(6, 3)), **given).rows
    assert (row.ok, row.same) == (True, False)


def test_a_tolerance_below_the_rounding_of_the_mini_batch_is_told_apart_from_another_loss() -> None:
    model, given = faults.chain(), {"schedules": ["1f1b"], "micro_batches": 4, "dtypes": ["float32"]}
    x, y = faults.batch()
    (row,) = checked(model, sample=x, target=y, tolerance=0.0, **given).rows
    assert (row.same, row.ok) == (True, False)
    assert "allow a larger tolerance" in row.text
    assert checked(model, sample=x, target=y, tolerance=row.mini_batch, **given).ok


def test_copies_of_the_model_that_train_as_one_are_the_same_up_to_rounding() -> None:
    (row,) = checked(faults.chain(), schedules=["chimera"], micro_batches=6, dtypes=["float64"]).rows
    assert row.ok
    assert 0 < (row.gradients or 0) < 1e-14
    assert not row.layer


def test_layers_that_mix_samples_or_draw_are_named() -> None:
    """They differ at once by nature."""
    for layer, mixes, draws in ((nn.BatchNorm1d(8), "2", ()), (nn.Dropout(0.5), "", ("2",))):
        report = checked(faults.chain(layer), schedules=["1f1b"], dtypes=["float64"], optimizer="adam")
        (row,), (facts,) = report.rows, report.plain
        assert row.same
        assert (facts.mixes, facts.draws) == (mixes, draws)
        if mixes:
            assert row.buffers == 0
            assert (facts.at_once or 0) > 1e-3
            assert (row.mini_batch or 0) < 1e-14


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_models_own_dtype(dtype: torch.dtype) -> None:
    x, y = faults.batch()
    report = checked(faults.chain().to(dtype), sample=x.to(dtype), target=y, schedules=["1f1b"])
    own = str(dtype).removeprefix("torch.")
    assert [row.dtype for row in report.rows] == list(dict.fromkeys(["float64", own]))
    assert report.ok


def test_the_model_the_batch_and_the_random_states_stay_as_they_were() -> None:
    model = faults.chain(nn.BatchNorm1d(8), nn.Dropout(), faults.OwnCount())
    x, y = faults.batch()
    plain.whole_step(model, x, y, nn.CrossEntropyLoss())
    before = copy.deepcopy(model.state_dict()), plain.gradients(model), x.clone()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    pipepart.check(model, x, target=y, loss_fn=nn.CrossEntropyLoss(), steps=1, schedules=["1f1b"])
    plain.assert_same(model.state_dict(), before[0])
    plain.assert_same(plain.gradients(model), before[1])
    assert x.equal(before[2])
    assert torch.get_rng_state().equal(states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # type: ignore[index]
    assert model[4].count == 1


def test_a_plan_of_ones_own() -> None:
    made = plan_by_hand(list("01234"), [1], micro_batches=3, schedule="zb-h1", recompute=("always", "never"))
    report = checked(faults.chain(), plan=made, dtypes=["own"])
    (row,) = report.rows
    assert (row.schedule, row.recompute, row.stages, report.micro_batches) == ("zb-h1", "mixed", 2, 3)
    assert row.same


def test_a_plan_for_the_model_warns_of_no_change_in_another_dtype(recwarn: pytest.WarningsRecorder) -> None:
    model, (x, y) = faults.chain(), faults.batch()
    profile = pipepart.profile(model, x, target=y, loss_fn=nn.CrossEntropyLoss(), micro_batches=2)
    made = pipepart.plan(profile, pipepart.Cluster.virtual(2), schedule="1f1b")
    assert checked(model, plan=made).ok
    assert not [warning for warning in recwarn if warning.category is pipepart.planning.ModelChanged]
    model[0] = nn.Linear(6, 8, bias=False)
    with pytest.warns(pipepart.planning.ModelChanged, match="layer '0'"):
        checked(model, plan=made)


def test_a_layer_that_cannot_do_the_dtype_fails_with_what_to_do() -> None:
    single = Calls(Tensor.float)
    with pytest.raises(RuntimeError) as caught:
        checked(faults.chain(single))
    assert "check dtypes=['own']" in caught.value.__notes__[-1]
    assert checked(faults.chain(single), dtypes=["own"]).ok


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"schedules": ["zigzag"]}, "'zigzag'"),
        ({"schedules": ["pipedream"]}, "'pipedream' changes the weights within a step"),
        ({"schedules": []}, "no schedule is named"),
        ({"dtypes": ["int64"]}, "dtype 'int64'"),
        ({"dtypes": []}, "no dtype is named"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"micro_batches": 0}, "micro_batches must be at least 1, got 0"),
        ({"optimizer": "lion"}, "optimizer 'lion'"),
        ({"recompute": ["often"]}, "recompute 'often'"),
        ({"devices": 6}, "has 6 stages, the model 5 layers"),
        ({"schedules": ["zb-v"], "devices": 3}, "schedule 'zb-v' on 3 devices has 6 stages"),
    ],
)
def test_what_cannot_be_checked_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        checked(faults.chain(), **options)


class Residual(nn.Module):
    """Blocks with skips around them, over inputs [samples, steps, 6]; its own loss has two terms of other shares."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.first(x.transpose(0, 1))  # samples are in dimension 1 from here on
        mask = torch.ones(len(x), len(x), dtype=x.dtype).tril()
        for block in self.blocks:
            x = x + torch.einsum("ts,sbd->tbd", mask, block(x))
        logits = self.last(x[-1])
        return {"loss": F.cross_entropy(logits, labels) + logits.square().mean(), "logits": logits}


def normed(*_: int) -> Calls:
    """A BatchNorm of what samples have in dimension 1."""
    return Calls(lambda x, norm: norm(x.flatten(0, 1)).view_as(x), norm=nn.BatchNorm1d(8))


SOME = torch.tensor([0, -100, -100, 1, 2, -100, 1, 0])
ALL = SOME.clamp(min=0)


@pytest.mark.parametrize(
    ("middle", "labels", "mixes"), [(nn.Linear, SOME, ""), (nn.Linear, ALL, ""), (normed, ALL, "blocks.1")]
)
def test_a_model_that_is_no_sequential_and_computes_its_own_loss(
    middle: Callable[..., nn.Module], labels: Tensor, mixes: str
) -> None:
    model = Residual(nn.Linear(8, 8), middle(8, 8), nn.Linear(8, 8))
    given = {"x": torch.randn(8, 4, 6), "labels": labels}
    report = pipepart.check(model, given, steps=1, schedules=["1f1b"])
    assert report.ok
    assert report.plain[0].mixes == mixes
    assert all((row.mini_batch is None) == bool(mixes) for row in report.rows)
    assert not mixes or (report.plain[0].at_once or 0) > 1e-3


def test_the_first_layer_that_differs_is_named_as_in_the_model() -> None:
    model = Residual(nn.Linear(8, 8), faults.OwnCount(), nn.Linear(8, 8))
    given = {"x": torch.randn(8, 4, 6), "labels": ALL}
    report = pipepart.check(model, given, steps=1, schedules=["1f1b"], recompute=["always"])
    assert not report.ok
    assert {(row.layer, row.kind, row.what) for row in report.rows} == {
        ("blocks.1", "OwnCount", "its output, step 0")
    }


def some(x: Tensor, parts: nn.ModuleList) -> Tensor:
    """Calls a part only for samples whose values ask for it."""
    for number, part in enumerate(parts):
        chosen = x[..., 0].argmax(1) == number
        if chosen.any():
            x = x + part(x) * chosen[:, None, None]
    return x


def reading() -> Calls:
    inner = Calls(some, parts=nn.ModuleList([nn.Linear(8, 8) for _ in range(4)]))
    whole = {"first": nn.Linear(6, 8), "reading": inner, "last": nn.Linear(8, 3)}
    return Calls(lambda x, first, reading, last: last(reading(first(x)))[:, -1], **whole)


def test_a_module_that_reads_values_is_kept_whole_on_request() -> None:
    model, x, y = reading(), torch.randn(8, 4, 6), torch.randint(3, (8,))
    of_loss: dict[str, Any] = {"target": y, "loss_fn": F.cross_entropy}
    given: dict[str, Any] = {**of_loss, "steps": 1, "micro_batches": 4}
    with pytest.raises(pipepart.CaptureError, match=r"Keep the module that reads it whole, layers="):
        pipepart.check(model, x, **given)
    assert pipepart.check(model, x, layers=["reading"], **given).ok
    profile = pipepart.profile(model, x, **of_loss, layers=["reading"], micro_batches=4, seconds=0)
    assert [layer.name for layer in profile.layers] == ["first", "reading", "last"]
    plan = pipepart.plan(profile, pipepart.Cluster.virtual(3, threads=1), schedule="1f1b")
    assert pipepart.check(model, x, plan=plan, **{**given, "micro_batches": None}).ok
