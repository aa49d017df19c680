"""``pipepart.check`` detects each fault and names the faulty layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipepart
from pipepart import CheckReport, Pipeline
from pipepart.verify import DifferentNumbers
from tests.verify import faults


def checked(model: nn.Module, **options: Any) -> CheckReport:
    """Two steps in float64 on two devices."""
    x, y = faults.batch()
    given: dict[str, Any] = {"target": y, "loss_fn": nn.CrossEntropyLoss(), "steps": 2, "dtypes": ["float64"]}
    return pipepart.check(model, x, **given | options)


@pytest.mark.parametrize(
    ("layer", "what"),
    [
        (faults.ForwardOfMainThread(), "its output, step 0"),
        (faults.NumbersOfMainThread(), "its output, step 0"),
        (faults.BackwardOfMainThread(), "the gradient of its input, step 0"),
        (faults.BufferOfMainThread(), "2.seen, step 0"),
    ],
)
def test_a_layer_that_does_something_else_on_a_workers_thread(layer: nn.Module, what: str) -> None:
    report = checked(faults.chain(layer))
    assert len(report.rows) == 3
    for row in report.rows:
        assert not row.ok
        assert not row.same
        assert (row.layer, row.kind, row.what) == ("2", type(layer).__name__, what)
        assert row.repeats
    named = rf"1f1b in float64: layer '2' \({type(layer).__name__}\) is the first"
    with pytest.raises(DifferentNumbers, match=named):
        report.raise_if_different()


def test_a_layer_whose_backward_knows_the_last_micro_batch_only() -> None:
    """Of two devices the first has several micro-batches in flight."""
    report = checked(faults.chain(faults.OneInFlight()), schedules=["sequential", "gpipe", "1f1b"])
    assert [(row.schedule, row.layer, row.what) for row in report.rows if not row.ok] == [
        (name, "2", "the gradient of its input, step 0") for name in ("gpipe", "1f1b")
    ]


def test_a_count_of_the_layers_own_is_right_unless_its_forward_runs_twice() -> None:
    report = checked(faults.chain(faults.OwnCount()), schedules=["1f1b"], recompute=["never", "always"])
    once, twice = report.rows
    assert once.same
    assert (twice.layer, twice.ok) == ("2", False)


def test_a_count_outside_of_the_model_makes_two_plain_runs_differ() -> None:
    report = checked(faults.chain(faults.SharedCount()), schedules=["1f1b"])
    assert (report.ok, report.rows[0].layer, report.rows[0].repeats) == (False, "2", False)
    assert "Two plain runs" in report.rows[0].text


def test_a_layer_that_cannot_be_copied_is_named() -> None:
    with pytest.raises(TypeError, match=r"layer '2' \(Uncopied\) cannot be copied.*__deepcopy__"):
        checked(faults.chain(faults.Uncopied()))


def test_a_mean_that_is_said_to_be_a_sum() -> None:
    """One that can be followed is refused."""
    for row in checked(faults.chain(), loss_fn=faults.mean, reduction="sum").rows:
        assert (row.ok, row.same, row.layer) == (False, True, "loss")
        assert row.mini_batch == pytest.approx(0.75)  # four times the loss
        assert "declare reduction='mean', 'sum' or 'batch'" in row.text
    with pytest.raises(pipepart.LossError, match="is a mean over samples, and reduction=sum is declared"):
        checked(faults.chain(), loss_fn=nn.CrossEntropyLoss(), schedules=["1f1b"], reduction="sum")


def test_a_loss_that_is_no_mean_though_it_is_said_to_be_one() -> None:
    """Of a function, and of the model itself."""
    given: dict[str, Any] = {"schedules": ["1f1b"], "reduction": "mean"}
    (row,) = checked(faults.chain(), loss_fn=faults.root_mean_square, **given).rows
    assert (row.ok, row.layer) == (False, "loss")
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), faults.OwnLoss())
    given |= {"target": None, "loss_fn": None}
    (row,) = checked(model, **given).rows
    assert (row.ok, row.layer, row.kind) == (False, "loss", "")
    (row,) = checked(model, **{**given, "reduction": "sum"}).rows
    assert row.ok


class LosesAGradient(Pipeline):
    """Forgets the gradient of the first parameter, which the last layer may share."""

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        loss = super().step(*args, target=target, **kwargs)
        next(self.parameters()).grad = None
        return loss


class OneMoreStep(Pipeline):
    """Runs the last micro-batch of each mini-batch twice."""

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        (x,) = pipepart.Arguments.of(args[0]).args
        super().step(x[-3:], target=target[-3:])
        return super().step(*args, target=target, **kwargs)


def test_a_pipeline_that_loses_a_gradient_or_counts_a_micro_batch_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipepart.verify.compare.Pipeline", LosesAGradient)
    embedding, head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
    head.weight = embedding.weight
    tokens = torch.randint(10, (12,))
    report = pipepart.check(
        nn.Sequential(embedding, nn.Tanh(), head),
        tokens,
        target=tokens,
        loss_fn=nn.CrossEntropyLoss(),
        devices=1,
        dtypes=["float64"],
        steps=1,
    )
    assert {(row.ok, row.layer, row.what) for row in report.rows} == {
        (False, "0", "the gradient of 0.weight, step 0")
    }
    monkeypatch.setattr("pipepart.verify.compare.Pipeline", OneMoreStep)
    (row,) = checked(faults.chain(), schedules=["1f1b"], steps=1).rows
    assert not row.ok
    assert row.losses == 0
    assert row.layer
