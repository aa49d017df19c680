"""A loss that returns its sum and its count: the loss of a step is the sum of sums by the sum of counts."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipepart import Pipeline, profile
from pipepart.loss import StepLoss
from tests.loss import by_parts
from tests.support import plain
from tests.support.chains import cut_by_hand

CLASSES = 4


def tokens(samples: int) -> tuple[Tensor, Tensor]:
    y = torch.randint(CLASSES, (samples, 5))
    for index in range(samples // 2):
        y[index, 1:] = -100
    return torch.randn(samples, 5, CLASSES).double(), y


def counted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    kept = target != -100
    losses = functional.cross_entropy(output.mT, target, reduction="none") + output.pow(2).mean(dim=2) * kept
    return losses.sum(), kept.sum()


def in_numbers(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    total, count = counted(output, target)
    return total, int(count)


def by_active(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A mean over those outputs that are positive, which nothing but the output tells."""
    active = output > 0
    return (output * active).sum(), active.sum()


@pytest.mark.parametrize("loss_fn", [counted, in_numbers])
@pytest.mark.parametrize(("samples", "micro_batches"), [(3, 5), (7, 3), (8, 2), (9, 4), (9, 1)])
def test_the_mean_is_that_of_the_mini_batch(loss_fn, samples, micro_batches):
    by_parts.check(loss_fn, *tokens(samples), micro_batches)


def test_a_micro_batch_may_count_nothing():
    output, target = tokens(6)
    target[:3] = -100
    by_parts.check(counted, output, target, 2)


def test_nothing_that_counts_is_not_a_number():
    output, target = tokens(4)
    loss, _ = by_parts.by_parts(StepLoss(counted), output, torch.full_like(target, -100), 2)
    expected, _ = by_parts.whole(counted, output, torch.full_like(target, -100))
    assert loss.isinf() == expected.isinf()
    assert loss.isnan() == expected.isnan()


def test_a_count_below_nothing_is_refused():
    def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return output.sum(), -1

    with pytest.raises(ValueError, match=r"count -1: a count is 0 or more"):
        by_parts.check(loss_fn, *tokens(4), 2)


def test_a_count_that_changes_when_asked_again_is_refused():
    counts = iter(range(1, 100))

    def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return output.sum(), next(counts)

    with pytest.raises(ValueError, match="must depend on the target alone"):
        by_parts.check(loss_fn, *tokens(4), 2)


def chain() -> nn.Sequential:
    return plain.in_double([nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, CLASSES)])


def check_step(model: nn.Module, loss_fn: Any, x: Tensor, y: Tensor | None, **options: Any) -> None:
    reference = plain.twin(model)
    with cut_by_hand(model, [1], loss_fn=loss_fn, **options) as pipe:
        loss = pipe.step(x, target=y)
    total, count = reference(x) if loss_fn is None else loss_fn(reference(x), y)
    (total / count).backward()
    plain.assert_near(loss, (total / count).detach(), what="loss")
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_a_step_of_a_pipeline(schedule, recompute):
    x, y = torch.randn(7, 5, 3).double(), tokens(7)[1]
    check_step(chain(), counted, x, y, schedule=schedule, recompute=recompute)


def test_a_count_of_the_outputs_values_is_refused_where_a_backward_needs_it_too_early():
    x, y = torch.randn(7, 5, 3).double(), tokens(7)[1]
    with pytest.raises(
        ValueError, match=r"counts of all 3 micro-batches, of which 2 are not known"
    ) as caught:
        check_step(chain(), by_active, x, y)
    assert "schedule='gpipe'" in str(caught.value)


def test_a_count_of_the_outputs_values_is_known_once_all_forwards_have_run():
    x, y = torch.randn(7, 5, 3).double(), tokens(7)[1]
    check_step(chain(), by_active, x, y, schedule="gpipe")
    check_step(chain(), by_active, x, y, micro_batches=1)


class OwnPair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        active = x > 0
        return (x * active).sum(), active.sum()


def test_a_model_that_computes_its_own_sum_and_count():
    model = plain.in_double([nn.Linear(3, 6), nn.Linear(6, 4), OwnPair()])
    check_step(model, None, torch.randn(7, 3).double(), None, schedule="gpipe")
    with pytest.raises(ValueError, match=r"the model returns \(sum, count\)"):
        check_step(plain.twin(model), None, torch.randn(7, 3).double(), None)


def test_it_is_profiled_planned_and_trained():
    x, y = torch.randn(6, 5, 3), tokens(6)[1]
    model = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, CLASSES))
    costs = profile(model, x, target=y, loss_fn=counted, micro_batches=2, seconds=0).costs[0]
    assert costs.loss.forward.seconds > 0
    with Pipeline.auto(model, x, target=y, loss_fn=counted, micro_batches=2) as pipe:
        loss = pipe.step(x, target=y)
    expected = torch.div(*counted(model(x), y)).detach()
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
