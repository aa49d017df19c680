"""Replicas of the model train as one, follow what the user does with the model, and refuse what cannot be copied."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipepart
from pipepart import Cluster, Pipeline
from pipepart.profiling import Costs, Timing
from tests.pipeline.conformance.layers import OwnGenerator
from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.in_backward import calls_in_backward
from tests.support.two_parts import Calls

LOSS = nn.MSELoss()
IN_TURN = (0, 1, 0, 1)  # the replicas that micro-batches take
X, Y = torch.randn(8, 3).double(), torch.randn(8, 4).double()


def network() -> nn.Sequential:
    return plain.in_double([nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.GELU()])


def cut(model: nn.Module, loss_fn: Any = LOSS, **how: Any) -> Pipeline:
    """Two replicas of two stages, the second from layer 2 on."""
    return cut_by_hand(model, [2], **{"loss_fn": loss_fn, "micro_batches": 4, "replicas": 2, **how})


def around(layer: nn.Module) -> nn.Sequential:
    return plain.in_double([nn.Linear(3, 4), layer, nn.Linear(4, 4)])


@pytest.mark.parametrize(("schedule", "copies"), [("1f1b", 2), ("gpipe", 3), ("zb-h1", 2), ("chimera", 1)])
def test_the_pipeline_itself_computes_and_differentiates_in_copies(schedule, copies):
    """Two outputs, one backward."""
    model = network()
    reference = plain.twin(model)
    ours, theirs = X.clone().requires_grad_(), X.clone().requires_grad_()
    with cut(model, replicas=copies, schedule=schedule) as pipe:
        with torch.no_grad():
            plain.assert_near(pipe(X).detach(), reference(X).detach())
        (pipe(ours).square().sum() + pipe(-X).sum()).backward()
    (reference(theirs).square().sum() + reference(-X).sum()).backward()
    plain.assert_close({"input": ours.grad}, {"input": theirs.grad})
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_fewer_samples_than_copies_leave_some_idle():
    with cut(network(), replicas=3) as pipe:
        plain.check_whole(pipe, X[:1], Y[:1], LOSS)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("first_weight", "classes"), [(1.0, [0, 1, 2, 3] * 2), (0.0, [1, 2, 0, 0, 0, 0, 3, 1])]
)
def test_buffers_of_a_loss_are_read_by_each_replica(strict, first_weight, classes):
    """Class weights may be zero for all samples of a micro-batch, where the mean is 0/0."""
    weight = torch.tensor([first_weight, 2.0, 3.0, 4.0]).double()
    loss_fn = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1)
    with cut(network(), loss_fn, strict=strict) as pipe:
        plain.check_whole(pipe, X, torch.tensor(classes), loss_fn)


class Scaled(nn.Module):
    """Scales by a buffer, and by a tensor that is none."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4))
        self.other = torch.ones(4, dtype=torch.double)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * self.other


def another_shape(model: Any) -> None:
    model[2].scale = torch.full((1,), 5.0, dtype=torch.double)


CHANGES: dict[str, Any] = {
    "mode": lambda model: setattr(model.train()[1], "p", 0.0),
    "another buffer of another shape": another_shape,
    "another tensor": lambda model: setattr(model[2], "other", model[2].other * 2),
    "values of a tensor": lambda model: model[2].other.mul_(2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_copies_follow_what_the_user_changes_between_steps(change):
    model = plain.in_double([nn.Linear(3, 4), nn.Dropout(0.5), Scaled(), nn.Linear(4, 4)]).eval()
    with cut(model) as pipe:
        pipe.step(X, target=Y)
        CHANGES[change](model)
        plain.check_step(pipe, X, Y, LOSS, 4, replica_of=IN_TURN)
        model.eval()
        plain.assert_near(pipe(X).detach(), model(X).detach())


def slow(costs: Costs) -> Costs:
    """The costs with a second for each forward, on any device, beside which the sums of gradients take no time."""
    second = {"forward": Timing(seconds=1.0), "slowdown": 1.0}
    return costs.model_copy(update={"layers": tuple(one.model_copy(update=second) for one in costs.layers)})


@pytest.mark.parametrize("norm", [True, False])
def test_auto_plans_one_replica_of_a_model_with_a_batch_norm_in_training(norm):
    layers = nn.BatchNorm1d(3).eval(), nn.Linear(3, 4), nn.BatchNorm1d(4).train(norm), nn.Linear(4, 4)
    model, x, y = nn.Sequential(*layers), X.float(), Y.float()
    profile = pipepart.profile(model, x, target=y, loss_fn=LOSS, micro_batches=4, seconds=0.0)
    assert bool(profile.writes_statistics) is norm
    profile = profile.model_copy(update={"costs": tuple(map(slow, profile.costs))})
    assert pipepart.plan(profile, Cluster.virtual(2), replicas="auto").replicas == (1 if norm else 2)


class Counting(nn.Module):
    """Counts its calls in a buffer, as a layer or as a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        if self.training:
            self.get_buffer("seen").add_(1)
        return x if target is None else nn.functional.mse_loss(x, target)


def test_a_loss_may_not_write_its_buffers():
    says = "the loss writes its buffer 'seen'"
    with cut(network(), Counting(), strict=True) as pipe, pytest.raises(ValueError, match=says):
        pipe.step(X, target=Y)


@pytest.mark.parametrize(
    ("layer", "name", "buffer"),
    [(Counting(), "1", "seen"), (nn.Sequential(nn.BatchNorm1d(4)), "1.0", "running_mean")],
    ids=["own", "batch norm"],
)
def test_a_layer_that_writes_a_buffer_is_refused(layer, name, buffer):
    with cut(around(layer)) as pipe:
        with pytest.raises(ValueError, match=rf"layer '{name}' writes its buffer '{buffer}' .* replicas=1"):
            pipe.step(X, target=Y)
        pipe.eval()
        plain.check_whole(pipe, X, Y, LOSS)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_refused_as_they_would_see_one_copy(register):
    model = network()
    with cut(model) as pipe:
        handle = getattr(model[2].weight, register)(lambda *_: None)
        with pytest.raises(ValueError, match=r"parameter '2.weight' has a hook"):
            pipe.step(X, target=Y)
        assert model[0].weight.grad is None
        with torch.no_grad():
            pipe(X)
        handle.remove()
        pipe.step(X, target=Y)


class Locked(nn.Identity):
    def __deepcopy__(self, memo: object) -> nn.Module:
        raise RuntimeError("one of a kind")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (OwnGenerator, r"layer '1' \(OwnGenerator\) has a random generator of its own, 'generator'"),
        (lambda: torch.jit.script(nn.Linear(4, 4)), r"layer '1' .* is TorchScript.*replicas=1"),
        (Locked, r"layer '1' \(Locked\) cannot be copied \(one of a kind\): .*replicas=1"),
    ],
    ids=["generator", "scripted", "locked"],
)
def test_a_layer_that_cannot_be_copied_is_refused_by_name(make, says):
    with pytest.raises(ValueError, match=says):
        cut(around(make()))


def test_a_backward_that_failed_in_a_copy_leaves_nothing_to_the_next_backward():
    """Of an output from before, so that no forward comes in between."""
    calls = iter(range(4))

    def fail() -> None:
        if threading.current_thread().name.endswith("virtual:3") and next(calls) == 1:
            raise ArithmeticError("when the copy has gradients")

    failing = Calls(lambda x: calls_in_backward(x, fail))
    model = plain.in_double([nn.Linear(3, 4), nn.Tanh(), failing, nn.Linear(4, 4)])
    reference = plain.twin(model)
    with cut(model) as pipe:
        fails, succeeds = pipe(X), pipe(X)
        with pytest.raises(ArithmeticError):
            fails.sum().backward()
        pipe.zero_grad()
        succeeds.sum().backward()
    reference(X).sum().backward()
    plain.assert_close(plain.gradients(model), plain.gradients(reference))
