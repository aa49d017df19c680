"""Replicas of the model train as one, follow what the user does with the model, and refuse what cannot be copied."""

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipepart
from pipepart import Cluster, Pipeline
from pipepart.profiling import Costs, Timing
from tests.support import plain
from tests.support.chains import plan_by_hand
from tests.support.replicas import IN_TURN, batch, cut_in_two, cut_replicas, model_for

LOSS = nn.MSELoss()


@pytest.mark.parametrize(("schedule", "copies"), [("1f1b", 2), ("gpipe", 3), ("zb-h1", 2), ("chimera", 1)])
def test_the_pipeline_itself_computes_and_differentiates_in_copies(schedule, copies):
    """Two outputs, one backward."""
    model = model_for(1)
    reference = plain.twin(model)
    x, other = batch()[0], batch()[0]
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    with cut_in_two(model, copies, schedule=schedule) as pipe:
        with torch.no_grad():
            plain.assert_near(pipe(x).detach(), reference(x).detach())
        (pipe(ours).square().sum() + pipe(other).sum()).backward()
    (reference(theirs).square().sum() + reference(other).sum()).backward()
    plain.assert_close({"input": ours.grad}, {"input": theirs.grad})
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_fewer_samples_than_copies_leave_some_idle():
    model = model_for(1)
    reference = plain.twin(model)
    x, y = batch(1)
    with cut_in_two(model, 3) as pipe:
        loss = pipe.step(x, target=y)
    plain.assert_near(loss, plain.whole_step(reference, x, y, LOSS))
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


class Late(nn.Module):
    """Takes its time in the second copy."""

    def forward(self, x: Tensor) -> Tensor:
        if threading.current_thread().name.endswith("virtual:1"):
            time.sleep(0.05)
        return x


def test_a_failure_in_the_loss_of_one_copy_ends_the_others():
    def fails_for_large(output: Tensor, target: Tensor):
        if float(target.max()) > 5:
            raise ArithmeticError("large")
        return (output - target).sum(), (output > 0).sum()

    model = plain.in_double([nn.Linear(3, 4), Late(), nn.Linear(4, 4)])
    x, y = batch()
    y[2:4] = 9  # of micro-batch 1, the first of the second copy
    pipe = cut_replicas(model, [], 2, loss_fn=fails_for_large, schedule="gpipe")
    with pipe, pytest.raises(ArithmeticError, match="large"):
        pipe.step(x, target=y)


@pytest.mark.parametrize("strict", [False, True])
def test_buffers_of_a_loss_may_be_read_and_not_written(strict):
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            self.get_buffer("calls").add_(1)
            return nn.functional.mse_loss(output, target)

    model = model_for(1)
    reference = plain.twin(model)
    plan = plan_by_hand(list("0123"), [2], replicas=2, micro_batches=4)
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]).double())
    x, y = batch()
    classes = torch.randint(4, (8,))
    with Pipeline(model, plan, loss_fn, strict=strict) as pipe:
        plain.assert_near(pipe.step(x, target=classes), plain.whole_step(reference, x, classes, loss_fn))
    plain.assert_close(plain.gradients(model), plain.gradients(reference))
    with (
        Pipeline(model, plan, Counts(), strict=True) as pipe,
        pytest.raises(ValueError, match="the loss writes its buffer 'calls'"),
    ):
        pipe.step(x, target=y)


@pytest.mark.parametrize("strict", [False, True])
def test_class_weights_may_be_zero_for_all_samples_of_a_micro_batch(strict):
    """The mean is 0/0 there, and each replica computes the sum with class weights on its device."""
    model = model_for(1)
    reference = plain.twin(model)
    weight = torch.tensor([0.0, 2.0, 3.0, 4.0]).double()
    loss_fn = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1)
    x, classes = batch()[0], torch.tensor([1, 2, 0, 0, 0, 0, 3, 1])
    plan = plan_by_hand(list("0123"), [2], replicas=2, micro_batches=4)
    with Pipeline(model, plan, loss_fn, strict=strict) as pipe:
        plain.assert_near(pipe.step(x, target=classes), plain.whole_step(reference, x, classes, loss_fn))
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


class Scaled(nn.Module):
    """Scales by a buffer, and by a tensor that is none."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4))
        self.other = torch.ones(4, dtype=torch.double)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * self.other.to(x.dtype)


def followed() -> nn.Sequential:
    return plain.in_double([nn.Linear(3, 4), nn.Dropout(0.5), Scaled(), nn.Linear(4, 4)]).eval()


def untraced(model: Any) -> None:
    version = model[0].weight._version
    model[0].weight.data.mul_(3)
    assert model[0].weight._version == version


CHANGES: dict[str, Any] = {
    "a write that leaves no trace": untraced,
    "frozen": lambda model: model[0].weight.requires_grad_(False),
    "mode": lambda model: setattr(model.train()[1], "p", 0.0),
    "rate of a dropout": lambda model: setattr(model.train()[1], "p", 1.0),
    "dtype": nn.Module.float,
    "values of a buffer": lambda model: model[2].scale.fill_(2),
    "another buffer of another shape": lambda model: setattr(
        model[2], "scale", torch.full((1,), 5.0, dtype=torch.double)
    ),
    "another tensor": lambda model: setattr(model[2], "other", model[2].other * 2),
    "values of a tensor": lambda model: model[2].other.mul_(2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_copies_follow_what_the_user_changes_between_steps(change):
    model = followed()
    x, y = batch()
    with cut_in_two(model) as pipe:
        pipe.step(x, target=y)
        CHANGES[change](model)
        if change == "dtype":
            x, y = x.float(), y.float()
        plain.check_step(pipe, x, y, LOSS, 4, replica_of=IN_TURN)
        model.eval()
        plain.assert_near(pipe(x).detach(), model(x).detach(), 1e-6 if change == "dtype" else 1e-12)


class Convolutional(nn.Module):
    """Is no chain, and has a BatchNorm that a frozen one precedes."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.norm = nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(4)
        self.linear, self.last = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.linear(self.frozen(x))).relu())


@pytest.mark.parametrize("norm", [True, False])
def test_auto_plans_one_replica_of_a_model_with_a_batch_norm_in_training(norm):
    model = Convolutional()
    if not norm:
        model.norm.eval()
    x, y = torch.randn(8, 3), torch.randn(8, 4)
    profile = pipepart.profile(model, x, target=y, loss_fn=nn.MSELoss(), micro_batches=4, seconds=0.0)
    assert bool(profile.writes_statistics) is norm
    assert all("norm" in name for name in profile.writes_statistics)
    slow = profile.model_copy(update={"costs": tuple(map(_slow, profile.costs))})
    assert pipepart.plan(slow, Cluster.virtual(2), replicas="auto").replicas == (1 if norm else 2)


def _slow(costs: Costs) -> Costs:
    """The costs with a second for each forward, beside which the sums of gradients take no time."""
    second = {"forward": Timing(seconds=1.0)}
    return costs.model_copy(update={"layers": tuple(one.model_copy(update=second) for one in costs.layers)})


class Counting(nn.Module):
    """Counts the samples that it has seen in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
        return x


@pytest.mark.parametrize(
    ("layer", "name", "buffer"),
    [(Counting(), "1", "seen"), (nn.Sequential(nn.BatchNorm1d(4)), "1.0", "running_mean")],
    ids=["own", "batch norm"],
)
def test_a_layer_that_writes_a_buffer_is_refused(layer, name, buffer):
    model = plain.in_double([nn.Linear(3, 4), layer, nn.Linear(4, 4)])
    x, y = batch()
    with cut_in_two(model) as pipe:
        with pytest.raises(ValueError, match=rf"layer '{name}' writes its buffer '{buffer}' .* replicas=1"):
            pipe.step(x, target=y)
        pipe.eval()
        plain.assert_near(pipe.step(x, target=y), nn.MSELoss()(model(x), y).detach())


def test_hooks_on_parameters_are_refused_as_they_would_see_one_copy():
    x, y = batch()
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        model = model_for(1)
        with cut_in_two(model) as pipe:
            handle = getattr(model[2].weight, register)(lambda *_: None)
            with pytest.raises(ValueError, match=r"parameter '2.weight' has a hook"):
                pipe.step(x, target=y)
            assert model[0].weight.grad is None
            pipe.eval()
            with torch.no_grad():
                pipe(x)
            handle.remove()
            pipe.step(x, target=y)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source = torch.Generator()


class Locked(nn.Identity):
    def __deepcopy__(self, memo: object) -> nn.Module:
        raise RuntimeError("one of a kind")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Noisy, r"layer '1' \(Noisy\) has a random generator of its own, 'source'"),
        (lambda: torch.jit.script(nn.Linear(4, 4)), r"layer '1' .* is TorchScript.*replicas=1"),
        (Locked, r"layer '1' \(Locked\) cannot be copied \(one of a kind\): .*replicas=1"),
    ],
    ids=["generator", "scripted", "locked"],
)
def test_a_layer_that_cannot_be_copied_is_refused_by_name(make, says):
    with pytest.raises(ValueError, match=says):
        cut_in_two(nn.Sequential(nn.Linear(3, 4), make(), nn.Linear(4, 4)))


class Failing(nn.Module):
    """Fails on inputs that hold a negative first number, forward or backward."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        return _Fail.apply(x, self.where)


class _Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, where: str) -> Tensor:
        ctx.fails = where == "backward" and x[0, 0] < 0
        if where == "forward" and x[0, 0] < 0:
            raise ArithmeticError("negative")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise ArithmeticError("negative")
        return gradients[0], None


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_failure_in_a_copy_is_placed_and_leaves_the_next_step_right(where):
    first = nn.Linear(3, 4, bias=False)
    nn.init.ones_(first.weight)
    model = plain.in_double([first, nn.Identity(), Failing(where), nn.Linear(4, 4)])
    x, y = batch()
    x = x.abs()
    bad = x.clone()
    bad[6:8] *= -1  # micro-batch 3, the second of copy 1, which has gradients of the first by then
    with cut_in_two(model) as pipe:
        with pytest.raises(ArithmeticError) as caught:
            pipe.step(bad, target=y)
        assert "stage 1 of 2 of copy 1 on virtual:3, micro-batch 3 of 4" in caught.value.__notes__[-1]
        plain.check_step(pipe, x, y, LOSS, 4, replica_of=IN_TURN)
