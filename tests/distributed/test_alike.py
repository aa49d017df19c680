"""Under torchrun a pipeline is made only of the same model and options on every rank, and values are compared."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import pipepart
from tests.support.chains import plan_by_hand
from tests.support.ranks import ranks

X, Y = torch.ones(8, 4), torch.zeros(8, dtype=torch.int64)


def model(**other: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.BatchNorm1d(4), nn.Linear(4, 3))
    for name, layer in other.items():
        made[int(name.removeprefix("layer_"))] = layer
    return made


def wide() -> nn.Module:
    return model(layer_3=nn.Linear(4, 5))


def likelier() -> nn.Module:
    return model(layer_1=nn.Dropout(0.2))


def in_double() -> nn.Module:
    return model(layer_3=nn.Linear(4, 3).double())


def smooth(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target, label_smoothing=0.1)


# What rank 1 does in another way, and what every rank raises.
OTHERS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "output": (wide, {}, r"layer '3' is Linear\(in_features=4, out_features=5\) on rank 1 and Linear\("),
    "dropout": (likelier, {}, r"layer '1' is Dropout\(p=0.2, inplace=False\) on rank 1 and Dropout\(p=0.1"),
    "dtype": (in_double, {}, r"'3.weight' is float64 \[3, 4\] on rank 1 and float32 \[3, 4\] on rank 0"),
    "shapes": (model, {"varying_shapes": True}, "varying_shapes is True on rank 1 and False on rank 0"),
    "loss": (model, {"loss_fn": smooth}, "loss_fn is smooth on rank 1 and CrossEntropyLoss"),
    "reduction": (
        model,
        {"loss_fn": nn.CrossEntropyLoss(reduction="sum")},
        r"loss_fn is CrossEntropyLoss\(reduction='sum'",
    ),
    "optimizer": (model, {"optimizer": torch.optim.SGD}, "optimizer is SGD on rank 1 and Adam on rank 0"),
}


def made(name: str) -> None:
    make, options, message = OTHERS[name]
    if os.environ["RANK"] != "1":
        make, options = model, {}
    given = {"loss_fn": nn.CrossEntropyLoss(), "optimizer": torch.optim.Adam, "timeout": 60.0, **options}
    with pytest.raises(ValueError, match=message):
        pipepart.Pipeline(make(), plan_by_hand(list("0123"), [1, 3], micro_batches=2), **given)


@pytest.mark.parametrize("name", OTHERS)
def test_a_pipeline_of_another_model_or_other_options_on_one_rank_is_refused_on_all(name):
    ranks(3).run(made, name)


def planned() -> None:
    options = {"micro_batches": 2 + int(os.environ["RANK"]), "schedule": "1f1b"}
    with pytest.raises(ValueError, match="micro_batches is 3 on rank 1 and 2 on rank 0"):
        pipepart.Pipeline.auto(model(), X, target=Y, loss_fn=nn.CrossEntropyLoss(), **options)


def test_a_plan_of_other_options_on_one_rank_is_refused_before_anything_is_measured():
    ranks(2).run(planned)


def told(seed_by_rank: bool) -> list[str]:
    torch.manual_seed(int(os.environ["RANK"]) if seed_by_rank else 0)
    made = model(layer_3=nn.Linear(4, 3))
    # Equal on all ranks, whatever it holds that is made anew on each.
    loss = partial(nn.functional.cross_entropy, weight=torch.ones(3))
    plan = plan_by_hand(list("0123"), [2], micro_batches=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pipepart.Pipeline(made, plan, loss, merge=lambda parts: torch.cat(parts)) as pipe:
            pipe.step(X, target=Y)
    return [str(one.message) for one in caught if "rank" in str(one.message)]


def test_other_initial_values_on_one_rank_are_told_once():
    assert ranks(2).run(told, False) == [[], []]
    first, second = ranks(2).run(told, True)
    assert len(first) == 1
    assert re.search(r"'3.weight' has other values on rank 1 .* Call torch.manual_seed", first[0])
    assert second == []
