"""An optimizer of each stage: the numbers of one over all, stepped as soon as a stage has its gradients."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipepart import Pipeline
from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.delayed import OptimizerFactory, batches

SGD: OptimizerFactory = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)  # noqa: E731
ADAM: OptimizerFactory = lambda params: torch.optim.Adam(params, lr=0.01)  # noqa: E731


def chain() -> nn.Sequential:
    return plain.in_double([layer for _ in range(4) for layer in (nn.Linear(5, 5), nn.Tanh())])


def pipeline(model: nn.Sequential, optimizer: Any, borders: tuple[int, ...] = (2, 5), **how: Any) -> Pipeline:
    return cut_by_hand(model, borders, loss_fn=nn.MSELoss(), micro_batches=4, optimizer=optimizer, **how)


def test_a_stage_steps_while_another_still_has_backwards_to_do():
    """The first stage's last backward waits for the step of the last stage."""
    model = chain()
    stepped = threading.Event()
    waited: list[bool] = []
    left = iter(range(4))

    def wait(_: Tensor) -> None:
        if next(left) == 3:
            waited.append(stepped.wait(timeout=30))

    next(model.parameters()).register_hook(wait)
    with pipeline(model, SGD, trace=True) as pipe:
        pipe.optimizers[-1].register_step_post_hook(lambda *_: stepped.set())
        ((x, y),) = batches(1, samples=8)
        pipe.step(x, target=y)
        assert pipe.last_trace is not None
        rows = pipe.last_trace.schedule.actions
    assert waited == [True]
    assert [[str(action) for action in row[-2:]] for row in rows] == [
        [f"{stage}B3", f"{stage}OPT_STEP"] for stage in range(3)
    ]


def test_what_needs_all_gradients_before_any_step_is_refused():
    ((x, y),) = batches(1, samples=8)
    with pipeline(chain(), SGD) as pipe:
        with pytest.raises(
            ValueError, match="clipping by the norm of all gradients needs all gradients before"
        ):
            pipe.clip_grad_norm_(1.0)
        with pytest.raises(ValueError, match="clipping needs all gradients before"):
            pipe.clip_grad_value_(1.0)
        with pytest.raises(ValueError, match="a scaler needs all gradients before"):
            pipe.step(x, target=y, scaler=torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize(
    ("factory", "error", "why"),
    [
        ("sgd", TypeError, "must make an optimizer of the parameters of a stage, got str"),
        (lambda params: params, TypeError, "must return a torch.optim.Optimizer, got list for stage 0"),
        (
            lambda _: torch.optim.SGD([nn.Parameter(torch.zeros(1))]),
            ValueError,
            "the optimizer of stage 0 has parameters that are not the stage's",
        ),
    ],
)
def test_a_factory_that_makes_no_optimizer_of_a_stage_is_refused(factory, error, why):
    with pytest.raises(error, match=why):
        pipeline(chain(), factory)
