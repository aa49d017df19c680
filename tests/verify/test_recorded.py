"""``pipepart.check`` on models that are no ``nn.Sequential``: their layers are observed as those of any model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipepart
from tests.verify import faults

pytestmark = pytest.mark.usefixtures("short_profiles")


class Residual(nn.Module):
    """Blocks with skips around them, over inputs [samples, steps, 6]; computes its own loss."""

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
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Normed(nn.Module):
    """A BatchNorm of what samples have in dimension 1."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, 1)).view_as(x)


def sample() -> dict[str, Tensor]:
    return {"x": torch.randn(8, 4, 6), "labels": torch.randint(3, (8,))}


def test_a_model_that_keeps_samples_apart_has_the_numbers_of_the_mini_batch() -> None:
    report = pipepart.check(
        Residual(*(nn.Linear(8, 8) for _ in range(3))), sample(), steps=1, schedules=["1f1b"]
    )
    assert report.ok
    assert report.plain[0].mixes == ""
    assert all(row.mini_batch is not None for row in report.rows)


def test_a_norm_that_mixes_samples_is_named_and_is_no_fault_of_the_pipeline() -> None:
    report = pipepart.check(
        Residual(nn.Linear(8, 8), Normed(), nn.Linear(8, 8)), sample(), steps=1, schedules=["1f1b"]
    )
    assert report.ok
    assert report.plain[0].mixes == "blocks.1"
    assert (report.plain[0].at_once or 0) > 1e-3


class Reading(nn.Module):
    """Calls a part only for samples whose values ask for it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for number, part in enumerate(self.parts):
            chosen = x[..., 0].argmax(1) == number
            if chosen.any():
                x = x + part(x) * chosen[:, None, None]
        return x


def test_a_module_that_reads_values_is_kept_whole_on_request() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.reading, self.last = nn.Linear(6, 8), Reading(), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.reading(self.first(x)))[:, -1]

    torch.manual_seed(0)
    model, x, y = Net(), torch.randn(8, 4, 6), torch.randint(3, (8,))
    of_loss: dict[str, Any] = {"target": y, "loss_fn": F.cross_entropy}
    given: dict[str, Any] = {**of_loss, "steps": 1, "micro_batches": 4}
    with pytest.raises(pipepart.CaptureError, match=r"Keep the module that reads it whole, layers="):
        pipepart.check(model, x, **given)
    assert pipepart.check(model, x, layers=["reading"], **given).ok
    profile = pipepart.profile(model, x, **of_loss, layers=["reading"], micro_batches=4, seconds=0)
    assert [layer.name for layer in profile.layers] == ["first", "reading", "last"]
    plan = pipepart.plan(profile, pipepart.Cluster.virtual(3, threads=1), schedule="1f1b")
    assert pipepart.check(model, x, plan=plan, **{**given, "micro_batches": None}).ok


def test_the_first_layer_that_differs_is_named_as_in_the_model() -> None:
    blocks = nn.Linear(8, 8), faults.OwnCount(), nn.Linear(8, 8)
    report = pipepart.check(Residual(*blocks), sample(), steps=1, schedules=["1f1b"], recompute=["always"])
    assert not report.ok
    assert {(row.layer, row.kind, row.what) for row in report.rows} == {
        ("blocks.1", "OwnCount", "its output, step 0")
    }


class TwoTerms(Residual):
    """Its own loss has a mean over targets that are not ignored, and one over all samples."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        made = super().forward(x, labels)
        return {**made, "loss": made["loss"] + made["logits"].square().mean()}


def test_terms_with_other_shares_are_compared_with_the_whole_mini_batch() -> None:
    given = {"x": torch.randn(8, 4, 6), "labels": torch.tensor([0, -100, -100, 1, 2, -100, 1, 0])}
    blocks = [nn.Linear(8, 8) for _ in range(3)]
    report = pipepart.check(TwoTerms(*blocks), given, steps=1, schedules=["gpipe"])
    assert report.ok
    assert not report.rows[0].same
