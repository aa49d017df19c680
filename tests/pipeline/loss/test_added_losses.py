"""Losses that layers add in the middle of a model, against the plain model that collects them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import pipepart
from tests.support import plain
from tests.support.chains import cut_by_hand

pytestmark = pytest.mark.usefixtures("short_profiles")

CLASSES = 5


class Balanced(nn.Module):
    """Adds two losses: a mean over samples of its gates, and a sum over samples of its outputs."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.gate = nn.Linear(features, 3)

    def forward(self, x: Tensor) -> Tensor:
        pipepart.add_loss(0.3 * self.gate(x).softmax(dim=1).pow(2).sum(dim=1).mean())
        y = self.linear(x)
        pipepart.add_loss(0.01 * y.pow(2).sum(), reduction="sum")
        return y


def chain() -> nn.Sequential:
    return plain.in_double(
        [nn.Linear(4, 6), Balanced(6), nn.Tanh(), nn.Linear(6, 6), Balanced(6), nn.Linear(6, CLASSES)]
    )


def whole_step(model: nn.Module, x: Tensor, y: Tensor | None, loss_fn: nn.Module) -> Tensor:
    with pipepart.collect_losses() as extra:
        output = model(x)
    loss = loss_fn(output, y) + extra.total()
    loss.backward()
    return loss.detach()


def batch(samples: int = 7) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 4).double(), torch.randint(CLASSES, (samples,))


@pytest.mark.parametrize(
    ("schedule", "chunks", "recompute", "strict"),
    [
        ("1f1b", 1, "always", True),
        ("gpipe", 1, "never", False),
        ("zb-h1", 1, "always", False),
        ("interleaved-1f1b", 2, "never", True),
    ],
)
def test_a_step_adds_them_up_over_stages_and_micro_batches(schedule, chunks, recompute, strict):
    model = chain()
    reference = plain.twin(model)
    x, y = batch(7)
    borders = [2, 4] if chunks == 1 else [1, 2, 4]
    with cut_by_hand(
        model,
        borders,
        loss_fn=nn.CrossEntropyLoss(),
        micro_batches=3 if chunks == 1 else 4,
        schedule=schedule,
        chunks=chunks,
        recompute=recompute,
        strict=strict,
    ) as pipe:
        loss = pipe.step(x, target=y)
    plain.assert_near(loss, whole_step(reference, x, y, nn.CrossEntropyLoss()), what="loss")
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_the_loss_of_an_asynchronous_step_is_the_mean_of_those_of_its_optimizer_steps(schedule):
    """A rate of 0 leaves the weights, so that each optimizer step has the loss of the plain model on its samples."""
    model, (x, y) = chain(), batch(8)
    options: dict[str, Any] = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.0)}
    with cut_by_hand(
        model, [2], loss_fn=nn.CrossEntropyLoss(), micro_batches=4, schedule=schedule, **options
    ) as pipe:
        loss = pipe.step(x, target=y)
    parts = 4 if schedule == "pipedream" else 2
    steps = [
        whole_step(model, *part, nn.CrossEntropyLoss())
        for part in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True)
    ]
    plain.assert_near(loss, torch.stack(steps).mean(), what="loss")


def test_they_count_beside_a_loss_of_the_whole_mini_batch_and_in_evaluation():
    model, (x, y) = chain(), batch()
    reference = plain.twin(model)
    loss_fn = nn.CrossEntropyLoss()
    with cut_by_hand(model, [2], loss_fn=loss_fn, schedule="gpipe", reduction="batch") as pipe:
        loss, evaluated = pipe.step(x, target=y), pipe.evaluate(x, target=y)
    expected = whole_step(reference, x, y, loss_fn)
    plain.assert_near(loss, expected, what="loss")
    plain.assert_near(evaluated, expected, what="loss in evaluation")
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_they_count_where_all_targets_of_a_micro_batch_are_ignored():
    model = chain()
    reference = plain.twin(model)
    x, y = batch(6)
    y[:2] = -100
    with cut_by_hand(model, [2], loss_fn=nn.CrossEntropyLoss()) as pipe:
        loss = pipe.step(x, target=y)
    plain.assert_near(loss, whole_step(reference, x, y, nn.CrossEntropyLoss()), what="loss")
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_the_drop_in_form_gives_them_to_whoever_collects(recompute):
    model = chain()
    reference = plain.twin(model)
    x, y = batch()
    with cut_by_hand(model, [2, 4], recompute=recompute) as pipe:
        with pipepart.collect_losses() as extra:
            output = pipe(x)
        loss = functional.cross_entropy(output, y) + 2 * extra.total()
        loss.backward()
    with pipepart.collect_losses() as extra:
        output = reference(x)
    expected = functional.cross_entropy(output, y) + 2 * extra.total()
    expected.backward()
    plain.assert_near(loss.detach(), expected.detach(), what="loss")
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_the_drop_in_form_without_collecting_is_the_plain_model_without_it():
    model = chain()
    reference = plain.twin(model)
    x, y = batch()
    with cut_by_hand(model, [2, 4]) as pipe:
        functional.cross_entropy(pipe(x), y).backward()
    functional.cross_entropy(reference(x), y).backward()
    ours, theirs = plain.gradients(model), plain.gradients(reference)
    gates = [name for name in theirs if ".gate." in name]
    assert all(ours[name] is None and theirs[name] is None for name in gates)
    plain.assert_close(ours, theirs)


def test_without_gradients_their_values_are_collected():
    model = chain().eval()
    x, _ = batch()
    with torch.no_grad(), cut_by_hand(model, [2, 4]) as pipe:
        with pipepart.collect_losses() as ours:
            pipe(x)
        with pipepart.collect_losses() as theirs:
            model(x)
    assert float(theirs.total()) > 0
    plain.assert_near(ours.total(), theirs.total())


def test_a_step_gives_nothing_to_whoever_collects_around_it():
    x, y = batch()
    with cut_by_hand(chain(), [2], loss_fn=nn.CrossEntropyLoss()) as pipe, pipepart.collect_losses() as extra:
        pipe.step(x, target=y)
    assert extra.found == []
    assert float(extra.total()) == 0


def test_a_model_that_adds_losses_is_profiled_and_planned():
    model, (x, y) = chain(), batch(6)
    reference = plain.twin(model)
    with pipepart.Pipeline.auto(model, x, target=y, loss_fn=nn.CrossEntropyLoss(), micro_batches=2) as pipe:
        loss = pipe.step(x, target=y)
    plain.assert_near(loss, whole_step(reference, x, y, nn.CrossEntropyLoss()), what="loss")


class Frozen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        pipepart.add_loss(torch.tensor(2.5))
        return x


def test_a_loss_without_gradient_counts_in_the_value():
    model = plain.in_double([nn.Linear(4, CLASSES), Frozen()])
    x, y = batch()
    with cut_by_hand(model, [1], loss_fn=nn.CrossEntropyLoss()) as pipe:
        loss = pipe.step(x, target=y)
    assert float(loss) == pytest.approx(float(functional.cross_entropy(model(x), y).detach()) + 2.5)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = Balanced(6)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)  # type: ignore[return-value]


def test_under_checkpointing_a_loss_counts_once():
    model = plain.in_double([nn.Linear(4, 6), Checkpointed(reentrant=False), nn.Linear(6, CLASSES)])
    reference = plain.twin(model)
    x, y = batch()
    with cut_by_hand(model, [2], loss_fn=nn.CrossEntropyLoss()) as pipe:
        loss = pipe.step(x, target=y)
    plain.assert_near(loss, whole_step(reference, x, y, nn.CrossEntropyLoss()), what="loss")
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_where_it_would_have_no_gradient_it_is_refused_and_the_layer_named():
    model = plain.in_double([nn.Linear(4, 6), Checkpointed(reentrant=True), nn.Linear(6, CLASSES)])
    x, y = batch()
    with (
        cut_by_hand(model, [2], loss_fn=nn.CrossEntropyLoss()) as pipe,
        pytest.raises(RuntimeError, match="add_loss was called with gradients disabled") as caught,
    ):
        pipe.step(x, target=y)
    assert any("layer '1' (Checkpointed)" in note for note in caught.value.__notes__)


def test_outside_of_all_it_does_nothing_but_look_at_its_arguments():
    pipepart.add_loss(torch.tensor(1.0))
    with pytest.raises(
        ValueError, match="what add_loss is given must be a scalar tensor, got a tensor of shape"
    ):
        pipepart.add_loss(torch.ones(3))
    with pytest.raises(ValueError, match="max"):
        pipepart.add_loss(torch.tensor(1.0), reduction="max")  # type: ignore[arg-type]
