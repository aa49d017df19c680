"""Optimizers around steps, and optimizers of stages: the parameters of plain or of delayed training."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from pipepart import Pipeline
from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.delayed import DelayedTraining, OptimizerFactory, borders_of
from tests.support.two_parts import Calls

pytestmark = pytest.mark.usefixtures("short_profiles")


LOSS = nn.CrossEntropyLoss()
X, Y = torch.linspace(-2, 2, 42).reshape(7, 6), torch.arange(7) % 3


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )


@pytest.mark.parametrize(("norm_type", "foreach"), [(1.0, None), (3.5, True), (float("inf"), False)])
def test_the_norm_is_that_of_the_plain_model(norm_type: float, foreach: bool | None) -> None:
    model = network()
    with cut_by_hand(model, [1, 3], loss_fn=LOSS) as pipe:
        reference = plain.check_step(pipe, X, Y, LOSS)
        norm = pipe.clip_grad_norm_(0.1, norm_type, foreach=foreach)
    assert norm.equal(nn.utils.clip_grad_norm_(reference.parameters(), 0.1, norm_type, foreach=foreach))
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_clipping_by_value_without_gradients_and_by_a_norm_that_is_not_finite() -> None:
    model = network()
    with cut_by_hand(model, [1, 3], loss_fn=LOSS) as pipe:
        assert pipe.clip_grad_norm_(1.0) == 0
        reference = plain.check_step(pipe, X, Y, LOSS)
        pipe.clip_grad_value_(0.01)
        nn.utils.clip_grad_value_(reference.parameters(), 0.01)
        plain.assert_same(plain.gradients(model), plain.gradients(reference))
        pipe.step(X * float("inf"), target=Y)
        with pytest.raises(RuntimeError, match=r"non-finite"):
            pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)


@pytest.mark.parametrize(("autocast", "schedule"), [(False, "zb-h1"), (True, "1f1b")])
def test_training_with_a_scaler_ends_where_plain_training_ends(autocast: bool, schedule: str) -> None:
    """The scale grows, overflows and backs off; clipping between: parameters and scale bit for bit."""
    model = network().eval()
    reference = plain.twin(model)
    ours, theirs = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, reference))
    scalers = [GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2)]
    context = torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast)
    with cut_by_hand(model, [2, 4], loss_fn=LOSS, schedule=schedule) as pipe:
        for step in range(6):
            x, y = torch.randn(7, 6), torch.randint(3, (7,))
            if step == 3:
                x[3, 3] = float("inf")  # a step that both skip
            pipe.zero_grad()
            theirs.zero_grad()
            with context:
                loss = pipe.step(x, target=y, scaler=scalers[0])
            for xs, ys in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
                with context:
                    part = LOSS(reference(xs), ys) * (len(xs) / len(x))
                scalers[1].scale(part).backward()
            assert step == 3 or float(loss) < 10  # it is not scaled
            for scaler, optimizer, own in zip(scalers, (ours, theirs), (model, reference), strict=True):
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(own.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
            assert scalers[0].get_scale() == scalers[1].get_scale()
    plain.assert_same(model.state_dict(), reference.state_dict())


@pytest.mark.parametrize("reduction", [None, "batch"])
def test_a_weight_and_a_scaler_multiply_gradients_and_leave_loss_and_output(reduction: str | None) -> None:
    model = network().eval()
    reference = plain.twin(model)
    losses = []
    with cut_by_hand(model, [2, 4], loss_fn=LOSS, schedule="gpipe", reduction=reduction) as pipe:
        for scaler in (None, GradScaler("cpu", enabled=False), GradScaler("cpu", init_scale=4.0)):
            how: dict[str, Any] = {"loss_weight": 0.25, "scaler": scaler, "return_outputs": True}
            loss, output = pipe.step(X, target=Y, **how)
            losses.append(loss)
            assert not output.requires_grad
            torch.testing.assert_close(output, reference(X).detach())
    expected = LOSS(reference(X), Y)
    (expected * 0.25 * (1 + 1 + 4)).backward()
    for loss in losses:
        torch.testing.assert_close(loss, expected.detach())
    plain.assert_close(plain.gradients(model), plain.gradients(reference), 1e-5)


OPTIMIZERS: dict[str, OptimizerFactory] = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
}
MSE = nn.MSELoss()


def chain(stages: int) -> nn.Sequential:
    torch.manual_seed(stages)
    pairs = ((nn.Linear(5, 5), nn.Tanh() if stage % 2 else nn.LayerNorm(5)) for stage in range(stages))
    return plain.in_double(layer for pair in pairs for layer in pair)


def pipeline(
    model: nn.Sequential, schedule: str, optimizer: Any = OPTIMIZERS["momentum"], **how: Any
) -> Pipeline:
    """Two layers a stage."""
    how = {"loss_fn": MSE, "micro_batches": 12, "schedule": schedule, "optimizer": optimizer, **how}
    return cut_by_hand(model, borders_of(len(model) // 2), **how)


def test_a_stage_steps_while_another_still_has_backwards_to_do():
    """The first stage's last backward waits for the step of the last stage."""
    model = chain(3)
    stepped = threading.Event()
    waited: list[bool] = []
    left = iter(range(4))

    def wait(_: Tensor) -> None:
        if next(left) == 3:
            waited.append(stepped.wait(timeout=30))

    next(model.parameters()).register_hook(wait)
    with pipeline(model, "1f1b", micro_batches=4, trace=True) as pipe:
        pipe.optimizers[-1].register_step_post_hook(lambda *_: stepped.set())
        x, y = plain.sample(8, 5)
        pipe.step(x, target=y)
        assert pipe.last_trace is not None
        rows = pipe.last_trace.schedule.actions
    assert waited == [True]
    assert [[str(action) for action in row[-2:]] for row in rows] == [
        [f"{stage}B3", f"{stage}OPT_STEP"] for stage in range(3)
    ]


def test_what_needs_all_gradients_before_any_step_is_refused():
    x, y = plain.sample(8, 5)
    with pipeline(chain(3), "1f1b") as pipe:
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
        pipeline(chain(3), "1f1b", factory)


CASES = [
    ("pipedream", 2, "adam", "always"),
    ("pipedream", 3, "momentum", "never"),
    ("pipedream", 4, "adam", "never"),
    ("pipedream-2bw", 2, "momentum", "never"),
    ("pipedream-2bw", 3, "adam", "always"),
]


@pytest.mark.parametrize(("schedule", "stages", "optimizer", "recompute"), CASES)
def test_weights_and_losses_are_those_of_delayed_updates(schedule, stages, optimizer, recompute):
    model = chain(stages)
    oracle = DelayedTraining(copy.deepcopy(model), stages, schedule, OPTIMIZERS[optimizer])
    with pipeline(model, schedule, OPTIMIZERS[optimizer], recompute=recompute) as pipe:
        for x, y in (plain.sample(24, 5) for _ in range(2)):
            ours, theirs = pipe.step(x, target=y), oracle.step(x, y, MSE, 12)
            assert ours.equal(theirs)
            assert_weights(model, oracle)


def assert_weights(model: nn.Module, oracle: DelayedTraining) -> None:
    theirs = [parameter for stage in oracle.stages for parameter in stage.parameters()]
    for (name, ours), expected in zip(model.named_parameters(), theirs, strict=True):
        assert ours.equal(expected), name


def test_a_mean_over_targets_counts_those_of_the_optimizer_step():
    model, loss_fn = chain(2), nn.CrossEntropyLoss(ignore_index=-1)
    oracle = DelayedTraining(copy.deepcopy(model), 2, "pipedream-2bw", OPTIMIZERS["momentum"])
    x, y = torch.randn(8, 5, dtype=torch.double), torch.tensor([0, 1, -1, -1, -1, 2, 3, 4])
    with pipeline(model, "pipedream-2bw", micro_batches=4, loss_fn=loss_fn) as pipe:
        for _ in range(2):
            ours = pipe.step(x, target=y)
            theirs = oracle.step(x, y, zero_for_none, 4, weigh=lambda part: int((part >= 0).sum()))
            assert ours.equal(theirs)
    assert_weights(model, oracle)


def zero_for_none(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that is 0 where all targets are ignored, with gradients that are, too."""
    if bool((target < 0).all()):
        return (output * 0).sum()
    return nn.functional.cross_entropy(output, target, ignore_index=-1)


def test_parameters_keep_their_memory_and_hooks_and_a_graph_of_the_caller_notices_the_writes():
    model = chain(3)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    seen: list[float] = []
    next(model.parameters()).register_hook(lambda gradient: seen.append(float(gradient.norm())))
    x, y = plain.sample(12, 5)
    outside = model(x.clone().requires_grad_()).sum()
    with pipeline(model, "pipedream") as pipe:
        pipe.step(x, target=y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outside.backward()
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
    assert len(seen) == 12


def test_after_a_failure_each_stage_has_the_newest_weights_it_made_and_trains_on():
    model = chain(3)
    fine = copy.deepcopy(model)
    calls = iter(range(100))

    def fail(x: torch.Tensor) -> torch.Tensor:
        if next(calls) == 5:
            raise ArithmeticError("no more")
        return x

    model[5], fine[5] = Calls(fail), nn.Identity()
    oracle = DelayedTraining(fine, 3, "pipedream", OPTIMIZERS["momentum"])
    (x, y), again = plain.sample(12, 5), plain.sample(12, 5)
    oracle.step(x, y, MSE, 12)
    with pipeline(model, "pipedream") as pipe:
        with pytest.raises(ArithmeticError, match="no more"):
            pipe.step(x, target=y)
        weights = [model.get_parameter(f"{layer}.weight") for layer in (0, 2, 4)]
        taken = [
            [next(iter(version.values())).equal(weight) for version in versions]
            for weight, versions in zip(weights, oracle.versions, strict=True)
        ]
        assert taken[2].index(True) == 5
        assert all(any(found[:6]) for found in taken)
        assert bool(pipe.step(again[0], target=again[1]).isfinite())


def test_what_an_asynchronous_schedule_cannot_train_is_refused():
    model = chain(2)
    with pytest.raises(ValueError, match=r"'pipedream' is asynchronous.*optimizer=lambda params"):
        pipeline(model, "pipedream", None)
    with (
        pipeline(model, "pipedream-2bw", micro_batches=4) as pipe,
        pytest.raises(ValueError, match="3 is no multiple of that; 2 or 4 is"),
    ):
        pipe.step(torch.randn(3, 5).double(), target=torch.randn(3, 5).double())
    model[2].weight = model[0].weight
    with pytest.raises(
        ValueError, match=r"'0.weight' is shared by layers of stages 0, 1.*put these layers in"
    ):
        pipeline(model, "pipedream")
