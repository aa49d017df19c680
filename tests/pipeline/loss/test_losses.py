"""Losses of every sort, added ones too: value and gradients are those of the whole mini-batch, or refused."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import pipepart
from pipepart import LossError, Pipeline
from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.pieces import WIDTH, Balanced, linear
from tests.support.two_parts import Calls

pytestmark = pytest.mark.usefixtures("short_profiles")

CLASSES = 5
CROSS_ENTROPY = nn.CrossEntropyLoss()


class Contrastive(nn.Module):
    """Every sample against all others of the batch, with a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0, dtype=torch.double))
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        a, b = functional.normalize(output, dim=1), functional.normalize(target, dim=1)
        return functional.cross_entropy(a @ b.T * self.temperature, torch.arange(len(a)))


class Scaled(nn.Module):
    """A mean with a parameter of its own, which states nothing of its reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.double))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (self.scale * output - target).pow(2).mean()


def checkpointed(reentrant: bool) -> Calls:
    return Calls(lambda x, inner: checkpoint(inner, x, use_reentrant=reentrant), inner=Balanced())


def scores(*layers: nn.Module) -> list[nn.Module]:
    """A classifier, with some layers in its middle."""
    return [linear(), nn.Tanh(), *layers, nn.Linear(WIDTH, CLASSES)]


def balanced() -> list[nn.Module]:
    return scores(Balanced(), linear(), Balanced())


X = torch.randn(11, WIDTH, dtype=torch.double)


@dataclass(frozen=True)
class Case:
    """Layers, a mini-batch, a loss, and options of a pipeline with a border behind the first layer."""

    layers: Callable[[], list[nn.Module]] = scores
    y: Any = None
    loss_fn: Any = CROSS_ENTROPY
    options: dict[str, Any] = field(default_factory=dict)
    x: Tensor = X


LABELS = torch.randint(CLASSES, (11,))
IGNORED = LABELS.where(torch.arange(11) > 3, -100)  # all of the first of three micro-batches
WEIGHTS = torch.tensor([0.1, 2.0, 1.0, 0.0, 3.0], dtype=torch.double)
NUMBERS = torch.randn(11, CLASSES, dtype=torch.double)
BATCH = {"schedule": "gpipe", "reduction": "batch"}
CASES: dict[str, Case] = {
    "mean": Case(y=LABELS),
    "sum": Case(y=LABELS, loss_fn=partial(partial(functional.cross_entropy, reduction="mean"), reduction="sum")),
    "fewer samples than parts": Case(y=LABELS[:2], x=torch.randn(2, WIDTH).double()),
    "weights of classes, of which one is 0": Case(y=LABELS, loss_fn=partial(functional.cross_entropy, weight=WEIGHTS)),
    "a micro-batch that is ignored": Case(y=IGNORED),
    "without target": Case(loss_fn=lambda output: output.pow(2).sum(dim=1).sum()),
    "parameters of its own": Case(y=NUMBERS, loss_fn=Scaled()),
    **{
        f"the model's own {reduction}, recompute {mode}": Case(
            lambda reduction=reduction: [linear(), linear(), Calls(lambda x: getattr(x.pow(2), reduction)())],
            loss_fn=None,
            options={"reduction": reduction, "recompute": mode},
        )
        for reduction, mode in (("mean", "never"), ("sum", "except-last"), ("mean", "always"))
    },
    **{
        f"any loss, recompute {mode}": Case(y=NUMBERS, loss_fn=Contrastive(), options=BATCH | {"recompute": mode})
        for mode in ("never", "always")
    },
    "added": Case(balanced, LABELS, options={"schedule": "gpipe"}),
    "added, strict": Case(balanced, LABELS, options={"recompute": "always", "strict": True}),
    "added, split backward": Case(balanced, LABELS, options={"schedule": "zb-h1", "recompute": "always"}),
    "added beside one of the whole": Case(balanced, LABELS, options=BATCH),
    "added where all are ignored": Case(balanced, IGNORED),
    "added under a checkpoint": Case(lambda: scores(checkpointed(reentrant=False)), LABELS),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_are_those_of_the_whole_mini_batch(name):
    case = CASES[name]
    model = plain.in_double(case.layers())
    with cut_by_hand(model, [1, 2], loss_fn=case.loss_fn, **case.options) as pipe:
        plain.check_whole(pipe, case.x, case.y, case.loss_fn)
        if name.startswith("any"):
            assert case.loss_fn.calls == 1
        stepped, model.training = pipe.step(case.x, target=case.y), True
        plain.assert_near(pipe.evaluate(case.x, target=case.y), stepped)


def test_what_is_not_a_number_or_all_ignored_gives_what_torch_gives():
    model = plain.in_double(scores())
    reference = plain.twin(model)
    x, ignored = torch.randn(4, WIDTH).double(), torch.full((4,), -100)
    with cut_by_hand(model, [1], loss_fn=CROSS_ENTROPY, micro_batches=2) as pipe:
        assert pipe.step(x, target=ignored).isnan()
        assert plain.whole_step(reference, x, ignored, CROSS_ENTROPY).isnan()
        plain.assert_same(plain.gradients(model), plain.gradients(reference))
        assert pipe.step(x * torch.nan, target=LABELS[:4]).isnan()


@pytest.mark.parametrize(("schedule", "steps"), [("pipedream", 4), ("pipedream-2bw", 2)])
def test_the_loss_of_an_asynchronous_step_is_the_mean_of_those_of_its_optimizer_steps(schedule, steps):
    """With what layers add. A rate of 0 leaves the weights, so that each step has the loss of the plain model."""
    model, losses = plain.in_double(balanced()), []
    how: dict[str, Any] = {"schedule": schedule, "optimizer": lambda params: torch.optim.SGD(params, lr=0.0)}
    with cut_by_hand(model, [2], loss_fn=CROSS_ENTROPY, micro_batches=4, **how) as pipe:
        loss = pipe.step(X[:8], target=LABELS[:8])
    for x, y in zip(X[:8].tensor_split(steps), LABELS[:8].tensor_split(steps), strict=True):
        with pipepart.collect_losses() as added:
            output = model(x)
        losses.append((functional.cross_entropy(output, y) + added.total()).detach())
    plain.assert_near(loss, torch.stack(losses).mean(), what="loss")


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_the_drop_in_form_gives_added_losses_to_whoever_collects(recompute, collects):
    """Where nobody does, gates that nothing else uses have no gradient."""
    model = plain.in_double(balanced())
    reference = plain.twin(model)
    losses = []
    with cut_by_hand(model, [2, 4], loss_fn=CROSS_ENTROPY, recompute=recompute) as pipe:
        for run in (pipe, reference):
            with pipepart.collect_losses() as added:
                output = run(X) if collects else None
            output = run(X) if output is None else output
            losses.append(functional.cross_entropy(output, LABELS) + 2 * added.total())
            losses[-1].backward()
        with torch.no_grad(), pipepart.collect_losses() as added:
            pipe(X)
        with pipepart.collect_losses() as around:
            pipe.evaluate(X, target=LABELS)
    plain.assert_near(losses[0].detach(), losses[1].detach(), what="loss")
    plain.assert_close(plain.gradients(model), plain.gradients(reference))
    assert float(added.total()) > 0
    assert around.found == []


def test_auto_profiles_and_plans_added_losses_and_all_forwards_first_for_a_loss_of_the_whole():
    model = plain.in_double(balanced())
    with Pipeline.auto(model, X, target=LABELS, loss_fn=CROSS_ENTROPY, micro_batches=2) as pipe:
        plain.check_whole(pipe, X, LABELS, CROSS_ENTROPY)
    options: dict[str, Any] = {"loss_fn": Contrastive(), "micro_batches": 2, "reduction": "batch"}
    with Pipeline.auto(plain.in_double(scores()), X, target=NUMBERS, **options) as pipe:
        assert pipe.plan.schedule in ("gpipe", "looped-bfs")
        pipe.step(X, target=NUMBERS)


def positive(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    chosen = output > 0.1
    return ((output - target).pow(2) * chosen).sum(), chosen.sum()


@pytest.mark.parametrize("optimizer", [None, lambda parameters: torch.optim.SGD(parameters, lr=0.1)])
def test_a_count_of_the_output_is_put_right_at_the_end_of_the_step(optimizer):
    """Gradients of an earlier step, or of an optimizer of each stage, stay what they are."""
    model, x, y = plain.in_double(scores()), X, NUMBERS
    reference = plain.twin(model)
    ours, again = (x.clone().requires_grad_() for _ in range(2))
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    with cut_by_hand(model, [1], loss_fn=positive, micro_batches=5, optimizer=optimizer) as pipe:
        for _ in range(2):
            ours.grad = again.grad = None
            pipe.step(ours, target=y)
            if optimizer:
                theirs.zero_grad()
            total, count = positive(reference(again), y)
            (total / count).backward()
            if optimizer:
                theirs.step()
    plain.assert_close({"input": ours.grad}, {"input": again.grad})
    plain.assert_close(plain.gradients(model), plain.gradients(reference))
    plain.assert_close(model.state_dict(), reference.state_dict())


def test_a_split_along_another_dimension_takes_a_sum_and_a_count():
    x, y = torch.randn(7, 5, WIDTH).double(), torch.randn(7, 5, CLASSES).double()

    def by_columns(pair: Any, parts: int) -> Any:
        return list(zip(pair[0].split([2, 3], 1), pair[1].split([2, 3], 1), strict=True))

    def counted(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return functional.mse_loss(output, target, reduction="sum"), output.numel()

    model = plain.in_double(scores())
    with cut_by_hand(model, [1], loss_fn=counted, micro_batches=2, split=by_columns) as pipe:
        plain.check_whole(pipe, x, y, nn.MSELoss())
    with (
        cut_by_hand(model, [1], loss_fn=nn.MSELoss(), micro_batches=2, split=by_columns) as pipe,
        pytest.raises(LossError, match="not split along its samples"),
    ):
        pipe.step(x, target=y)


def worst(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().max() ** 2


REFUSED: dict[str, tuple[Any, str]] = {
    "maximum": (worst, r"worst \(test_losses.py:\d+\) cannot be split.*max at loss/test_losses.py:\d+.*\"batch\""),
    "a vector": (lambda output, target: (output - target).mean(1), r"must be a scalar tensor, got a tensor .*\[4"),
    "a float": (lambda output, target: 1.5, "must be a scalar tensor, got a float"),
    "detached": (lambda output, target: functional.mse_loss(output.detach(), target), "gradient"),
    "whole numbers": (lambda output, target: (output - target).abs().long().sum(), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_does_not_add_up_or_is_none_is_refused_before_any_gradient_is_there(name):
    loss_fn, words = REFUSED[name]
    model = plain.in_double(scores())
    with cut_by_hand(model, [1], loss_fn=loss_fn) as pipe:
        with pytest.raises(LossError, match=f"(?s){words}"):
            pipe.step(X, target=NUMBERS)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_refusal_in_the_middle_of_a_step_leaves_no_gradients():
    calls = 0

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return functional.mse_loss(output, target) * (2.0 if calls == 3 else 1.0)

    model = plain.in_double(scores())
    with cut_by_hand(model, [1], loss_fn=loss_fn, micro_batches=4) as pipe:
        with pytest.raises(LossError, match="something else than for micro-batch 0"):
            pipe.step(X, target=NUMBERS)
        assert all(parameter.grad is None for parameter in model.parameters())
        pipe.step(X, target=NUMBERS)


def test_an_added_loss_that_would_have_no_gradient_is_refused_and_the_layer_named():
    model = plain.in_double([linear(), checkpointed(reentrant=True), nn.Linear(WIDTH, CLASSES)])
    with (
        cut_by_hand(model, [2], loss_fn=CROSS_ENTROPY) as pipe,
        pytest.raises(RuntimeError, match="add_loss was called with gradients disabled") as caught,
    ):
        pipe.step(X, target=LABELS)
    assert any("layer '1' (Calls)" in note for note in caught.value.__notes__)


def test_a_model_without_a_loss_or_without_a_reduction_and_schedules_that_begin_backwards_are_refused():
    model = plain.in_double(scores())
    own = plain.in_double([linear(), Calls(lambda x: x.pow(2).mean())])
    with cut_by_hand(own, [1]) as pipe, pytest.raises(LossError, match=r"reduction=\"mean\""):
        pipe.step(X)
    with (
        cut_by_hand(model, [2]) as pipe,
        pytest.raises(ValueError, match=r"no loss_fn is given, .* shape \[4, 5\]"),
    ):
        pipe.step(X)
    with pytest.raises(LossError, match=r"pipepart\.plan\(profile, cluster, reduction='batch'\)"):
        cut_by_hand(model, [1], loss_fn=Contrastive(), schedule="1f1b", reduction="batch")
    with pytest.raises(ValueError, match=r"reduction='batch' .* got schedule='1f1b'"):
        Pipeline.auto(model, X, schedule="1f1b", reduction="batch")
    with pytest.raises(LossError, match="needs a loss_fn"):
        cut_by_hand(model, [1], schedule="gpipe", reduction="batch")
