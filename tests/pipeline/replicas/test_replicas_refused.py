"""What cannot be in several replicas of the model is refused by name, and a failure in one is told."""

from typing import Any

import pytest
import torch
from torch import nn

import pipepart
from pipepart import Cluster
from pipepart.profiling import Costs, Timing
from tests.support import plain
from tests.support.replicas import IN_TURN, batch, cut_in_two, model_for, summed_step


class Convolutional(nn.Module):
    """Is no chain, and has a BatchNorm that a frozen one precedes."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.norm = nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(4)
        self.linear, self.last = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Fail.apply(x, self.where)


class _Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, where: str) -> torch.Tensor:
        ctx.fails = where == "backward" and x[0, 0] < 0
        if where == "forward" and x[0, 0] < 0:
            raise ArithmeticError("negative")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.fails:
            raise ArithmeticError("negative")
        return gradients[0], None


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_failure_in_a_copy_is_placed_and_leaves_the_next_step_right(where):
    first = nn.Linear(3, 4, bias=False)
    nn.init.ones_(first.weight)
    model = plain.in_double([first, nn.Identity(), Failing(where), nn.Linear(4, 4)])
    reference = plain.twin(model)
    x, y = batch()
    x = x.abs()
    bad = x.clone()
    bad[6:8] *= -1  # micro-batch 3, the second of copy 1, which has gradients of the first by then
    with cut_in_two(model) as pipe:
        with pytest.raises(ArithmeticError) as caught:
            pipe.step(bad, target=y)
        assert "stage 1 of 2 of copy 1 on virtual:3, micro-batch 3 of 4" in caught.value.__notes__[-1]
        model.zero_grad()
        pipe.step(x, target=y)
    summed_step(reference, x, y, nn.MSELoss(), IN_TURN)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))
