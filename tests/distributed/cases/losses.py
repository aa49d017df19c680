"""Losses, their gradients, and what is done with these; replicas that do not all do the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipepart import Pipeline
from tests.distributed.cases.models import CLASSES, LOSSES, Overflow, classifier, labelled
from tests.distributed.cases.registry import on
from tests.distributed.training import TIMEOUT, adam, drawn_batches, gradients, trained
from tests.support.chains import cut_by_hand
from tests.support.pieces import WIDTH, Balanced, linear


def classify(borders: list[int], loss: str, **options: Any) -> Pipeline:
    return cut_by_hand(classifier(), borders, loss_fn=LOSSES[loss], timeout=TIMEOUT, **options)


@on(3, "ignored", "1f1b", slow=True)
@on(3, "sum and count", "zb-h1", slow=True)
@on(3, "known last", "gpipe")
@on(3, "known last", "1f1b", slow=True)
@on(3, "smoothed", "1f1b", slow=True)
@on(4, "ignored", "1f1b", 2)
@on(4, "sum and count", "1f1b", 2, slow=True)
def divided_by_what_all_micro_batches_count(loss: str, schedule: str, replicas: int = 1) -> dict[str, Any]:
    borders, parts = ([2], 5) if replicas > 1 else ([2, 4], 4)
    pipe = classify(borders, loss, schedule=schedule, micro_batches=parts, replicas=replicas)
    return trained(pipe, labelled((12, 12, 3)), max_norm=0.1)


@on(3, "never", slow=True)
@on(3, "always")
def losses_that_layers_add(recompute: Any) -> dict[str, Any]:
    layers = [linear(), Balanced(), nn.Tanh(), linear(), Balanced(), nn.Linear(WIDTH, CLASSES)]
    model, loss = nn.Sequential(*layers).double(), nn.CrossEntropyLoss()
    pipe = cut_by_hand(model, [2, 4], loss_fn=loss, recompute=recompute, timeout=TIMEOUT)
    return trained(pipe, labelled((7, 8, 2)))


@on(2)
def a_loss_of_the_whole_mini_batch() -> dict[str, Any]:
    def contrast(output: Tensor, target: Tensor) -> Tensor:
        scores = output @ output.t()
        return functional.cross_entropy(scores, torch.arange(len(output))) + output.mul(target).mean()

    model = nn.Sequential(linear(), nn.Tanh(), linear(), linear()).double()
    how: dict[str, Any] = {"reduction": "batch", "schedule": "gpipe", "micro_batches": 4}
    pipe = cut_by_hand(model, [2], loss_fn=contrast, timeout=TIMEOUT, **how)
    return trained(pipe, drawn_batches([9, 8, 3]), max_norm=0.1)


@on(3, "pipedream", slow=True)
@on(3, "pipedream-2bw")
def asynchronous(schedule: str) -> dict[str, Any]:
    def momentum(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    pipe = classify([1, 4], "ignored", micro_batches=12, schedule=schedule, optimizer=momentum)
    batches = [(x, y.abs() % CLASSES) for x, y in labelled((24, 24, 12))]
    return trained(pipe, batches, optimizer=None)


@on(2, 2.0, slow=True)
@on(2, 3.5)
@on(2, float("inf"), slow=True)
def clipped(norm_type: float) -> dict[str, Any]:
    """By the norm of the gradients of all ranks, and by value; numbers that are not finite are told."""
    norms = []
    with classify([2], "ignored") as pipe:
        for x, y in labelled((12, 6)):
            pipe.zero_grad()
            pipe.step(x, target=y)
            norms.append(pipe.clip_grad_norm_(0.01, norm_type))
        pipe.clip_grad_value_(1e-3)
        found = gradients(pipe)
        pipe.step(torch.full((6, WIDTH), float("inf")).double(), target=torch.zeros(6).long())
        with pytest.raises(RuntimeError, match=r"not finite|non-finite"):
            pipe.clip_grad_norm_(0.01, norm_type, error_if_nonfinite=True)
    return {"norms": norms, "gradients": found}


@on(3, torch.float32, slow=True)
@on(3, torch.bfloat16)
@on(3, torch.float32, True, slow=True)
@on(3, torch.float16, False, True, slow=True)
def an_overflow_on_one_rank(dtype: torch.dtype, frozen: bool = False, called: bool = False) -> dict[str, Any]:
    """The gradients of the first stage alone overflow in the fifth step.

    ``frozen``: that of the second has none. ``called``: the caller goes backward, without unscaling.
    """
    overflow = Overflow()
    model = nn.Sequential(linear(), overflow, linear(), nn.Tanh(), linear(), nn.Linear(WIDTH, CLASSES))
    model[2].requires_grad_(not frozen)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    found: dict[str, Any] = {"losses": [], "scales": []}
    with cut_by_hand(model, [2, 4], loss_fn=nn.CrossEntropyLoss(), timeout=TIMEOUT) as pipe:
        optimizer = adam([parameter for parameter in pipe.parameters() if parameter.requires_grad])
        for step, (x, y) in enumerate(labelled((7,) * 7)):
            overflow.on = step == 4
            pipe.zero_grad()
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
                out = pipe(x.float()) if called else pipe.step(x.float(), target=y, scaler=scaler)
            if called:
                out = functional.cross_entropy(out.float(), y)
                scaler.scale(out).backward()
            else:
                scaler.unscale_(optimizer)
                pipe.clip_grad_norm_(0.5)
            scaler.step(optimizer)
            scaler.update()
            found["losses"].append(out.detach())
            found["scales"].append(scaler.get_scale())
        found["state"] = pipe.full_state_dict()
    return found


@on(2, "sum and count", slow=True)
@on(2, "known last", slow=True)
@on(4, "ignored", 2)
def gradients_of_several_steps(loss: str, replicas: int = 1) -> dict[str, Any]:
    """They add up, each once; one bias has none."""
    pipe = classify([2], loss, replicas=replicas, micro_batches=5 if replicas > 1 else 3)
    pipe.module.get_parameter("0.bias").requires_grad_(False)
    batches = labelled((12, 11, 1) if replicas > 1 else (7, 5, 6))
    return trained(pipe, batches, optimizer=None, loss_weight=1 / 3, return_outputs=True)


class Sometimes(nn.Module):
    """Uses a parameter for some micro-batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.never = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.used if float(x.sum()) > 0 else x


@on(4)
def used_by_some_replicas() -> dict[str, Any]:
    model = nn.Sequential(linear(), Balanced(), Sometimes(), linear()).double()
    how: dict[str, Any] = {"replicas": 2, "micro_batches": 2, "timeout": TIMEOUT}
    return trained(cut_by_hand(model, [2], loss_fn=nn.MSELoss(), **how), drawn_batches([4, 2, 3, 4, 6]))
