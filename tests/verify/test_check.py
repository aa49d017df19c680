"""``pipepart.check`` on correct models: its report, and the state that it must not change."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pipepart
from pipepart import CheckReport
from pipepart.verify import DifferentNumbers
from tests.support import plain
from tests.support.chains import plan_by_hand
from tests.verify import faults

pytestmark = pytest.mark.usefixtures("short_profiles")


def checked(model: nn.Module, **options: Any) -> CheckReport:
    """Two steps on two devices, in both dtypes."""
    x, y = faults.batch()
    given: dict[str, Any] = {"sample": x, "target": y, "loss_fn": nn.CrossEntropyLoss(), "steps": 2}
    return pipepart.check(model, **given | options)


def test_every_schedule_is_the_same_bit_for_bit_in_both_dtypes() -> None:
    report = checked(faults.chain())
    assert [(row.schedule, row.dtype) for row in report.rows] == [
        (schedule, dtype) for dtype in ("float64", "float32") for schedule in ("gpipe", "1f1b", "zb-h1")
    ]
    assert all(row.same and row.ok and not row.layer for row in report.rows)
    assert all(row.buffers is None for row in report.rows)
    assert max(row.mini_batch or 0 for row in report.rows if row.dtype == "float64") < 1e-14
    report.raise_if_different()


def test_strict_devices_raise_what_accelerators_would() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = torch.ones(8)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.mask

    model = nn.Sequential(nn.Linear(8, 8), Masked(), nn.Linear(8, 4))
    given: dict[str, Any] = {
        "sample": torch.randn(8, 8),
        "loss_fn": nn.MSELoss(),
        "target": torch.randn(8, 4),
    }
    given |= {"schedules": ["1f1b"], "steps": 1}
    assert checked(model, **given, dtypes=["own"]).ok
    with pytest.raises(RuntimeError, match="attribute 'mask' of layer '1'"):
        checked(model, **given, dtypes=["own"], strict=True)
    assert checked(faults.chain(), strict=True, schedules=["1f1b"]).ok


class Jump(nn.Module):
    """Makes much of rounding: its slope is another one on either side of a border that numbers lie on."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.where(x.detach() * 1e8 % 2 < 1, 1.0, 2.0).to(x)


def test_rounding_is_not_carried_on_from_step_to_step() -> None:
    """Ten steps of a model that would end anywhere, had it begun a little beside."""
    (row,) = checked(
        nn.Sequential(
            *(layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh(), Jump())), nn.Linear(6, 3)
        ),
        schedules=["chimera"],
        micro_batches=4,
        steps=10,
        dtypes=["own"],
    ).rows
    assert row.ok
    assert not row.same


def test_a_tolerance_below_the_rounding_of_the_mini_batch_is_told_apart_from_another_loss() -> None:
    model, given = faults.chain(), {"schedules": ["1f1b"], "micro_batches": 4, "dtypes": ["float32"]}
    x, y = faults.batch()
    (row,) = checked(model, sample=x, target=y, tolerance=0.0, **given).rows
    assert row.same
    assert not row.ok
    assert "allow a larger tolerance" in row.text
    assert checked(model, sample=x, target=y, tolerance=row.mini_batch, **given).ok


def test_copies_of_the_model_that_train_as_one_are_the_same_up_to_rounding() -> None:
    (row,) = checked(faults.chain(), schedules=["chimera"], micro_batches=6, dtypes=["float64"]).rows
    assert row.ok
    assert 0 < (row.gradients or 0) < 1e-14
    assert not row.layer


def test_batch_norm_differs_at_once_by_nature_and_is_named() -> None:
    report = checked(faults.chain(nn.BatchNorm1d(8)), schedules=["1f1b"], dtypes=["float64"])
    (row,), (facts,) = report.rows, report.plain
    assert row.same
    assert row.buffers == 0
    assert facts.mixes == "2"
    assert (facts.at_once or 0) > 1e-3
    assert (row.mini_batch or 0) < 1e-14


def test_random_layers_draw_alike_and_are_named() -> None:
    report = checked(faults.chain(nn.Dropout(0.5)), schedules=["1f1b"], dtypes=["float64"], optimizer="adam")
    assert report.rows[0].same
    assert report.plain[0].draws == ("2",)


def test_a_loss_that_returns_a_sum_and_a_count() -> None:
    def kept(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        counts = (target != 0).to(output.dtype)
        return (nn.functional.cross_entropy(output, target, reduction="none") * counts).sum(), counts.sum()

    report = checked(faults.chain(), loss_fn=kept, schedules=["gpipe", "zb-h1"], dtypes=["float64"])
    assert all(row.same and (row.mini_batch or 0) < 1e-14 for row in report.rows)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_loss_that_writes_into_the_output(micro_batches: int) -> None:
    def squared(output: Tensor, target: Tensor) -> Tensor:
        return output.sub_(target[:, None]).square().mean()

    report = checked(faults.chain(), loss_fn=squared, micro_batches=micro_batches, schedules=["1f1b"])
    assert all(row.same and (row.mini_batch or 0) < 1e-6 for row in report.rows)


class Balanced(nn.Module):
    """Adds a loss of its own, as a mixture of experts does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x)
        pipepart.add_loss(made.square().mean())
        return made


def test_losses_that_layers_add_in_the_middle() -> None:
    report = checked(faults.chain(Balanced(), Balanced()), dtypes=["float64"], schedules=["gpipe", "zb-h1"])
    assert report.ok
    assert max(row.gradients or 0 for row in report.rows) == 0
    assert max(row.mini_batch or 0 for row in report.rows) < 1e-14


class Masked(nn.Module):
    """Takes a mask that is the same for every sample beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        return self.inner(given["x"] * given["mask"])


def test_a_tensor_that_goes_whole_to_every_micro_batch() -> None:
    x, _ = faults.batch()
    sample = {"x": x, "mask": pipepart.Whole(torch.tensor([1.0, 0, 1, 1, 0, 1]))}
    report = checked(nn.Sequential(Masked(), nn.Tanh()), sample=(sample,), schedules=["1f1b"])
    assert all(row.same and row.mini_batch is not None and row.ok for row in report.rows)


def test_micro_batches_of_ones_own() -> None:
    def by_twos(pair: tuple[Tensor, Tensor], most: int) -> list[tuple[Tensor, Tensor]]:
        x, y = pair
        return [(x[start::most], y[start::most]) for start in range(most)]

    report = checked(faults.chain(), split=by_twos, micro_batches=5, schedules=["gpipe", "zb-h1"])
    assert report.micro_batches == 5
    assert all(row.same and row.mini_batch is None for row in report.rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_models_own_dtype(dtype: torch.dtype) -> None:
    x, y = faults.batch()
    report = pipepart.check(
        faults.chain().to(dtype), x.to(dtype), target=y, loss_fn=nn.CrossEntropyLoss(), schedules=["1f1b"]
    )
    own = str(dtype).removeprefix("torch.")
    assert [row.dtype for row in report.rows] == list(dict.fromkeys(["float64", own]))
    assert report.ok


def test_nothing_to_train() -> None:
    report = checked(faults.chain().requires_grad_(False), schedules=["1f1b"])
    assert report.ok
    assert report.rows[0].gradients is None


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
    made = plan_by_hand(
        [str(index) for index in range(5)],
        [1],
        micro_batches=3,
        schedule="zb-h1",
        recompute=("always", "never"),
    )
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


def test_a_difference_is_raised_with_schedule_layer_and_reason() -> None:
    report = checked(faults.chain(faults.ForwardOfMainThread()), schedules=["1f1b"], dtypes=["float64"])
    with pytest.raises(
        DifferentNumbers, match=r"1f1b in float64: layer '2' \(ForwardOfMainThread\) is the first"
    ):
        report.raise_if_different()


def test_a_layer_that_cannot_be_copied_is_named() -> None:
    with pytest.raises(TypeError, match=r"layer '2' \(Uncopied\) cannot be copied.*__deepcopy__"):
        checked(faults.chain(faults.Uncopied()))


class Single(nn.Module):
    """Works in float32 whatever it gets."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def test_a_layer_that_cannot_do_the_dtype_fails_with_what_to_do() -> None:
    with pytest.raises(RuntimeError) as caught:
        checked(faults.chain(Single()))
    assert "check dtypes=['own']" in caught.value.__notes__[-1]
    assert checked(faults.chain(Single()), dtypes=["own"]).ok


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


def test_layers_that_hold_a_sparse_buffer_are_checked() -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("graph", torch.eye(4).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(self.get_buffer("graph"), x.t()).t()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Graph(), nn.Linear(4, 4))
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    report = pipepart.check(model, x, target=y, loss_fn=nn.MSELoss(), steps=2, schedules=["1f1b"])
    assert [(row.parameters, row.buffers) for row in report.rows] == [(0.0, 0.0)] * 2
