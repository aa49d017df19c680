"""``pipepart.check`` runs the user's own model: layers that compute something else are found, whatever it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipepart
from pipepart.capture import Chain
from pipepart.verify import training
from tests.verify import faults

pytestmark = pytest.mark.usefixtures("short_profiles")

Between = Callable[[nn.Module, Tensor], Tensor]


class Counter(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("seen").add_(1)
        return x


class Step(nn.Module):
    """A layer that calls a function with modules that it holds."""

    def __init__(self, function: Callable[..., Tensor], *held: nn.Module) -> None:
        super().__init__()
        self.held, self.function = nn.ModuleList(held), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(*self.held, x)


class Net(nn.Module):
    """A model, and the layers that a recording is said to have made of it: ``steps``."""

    def __init__(self, between: Between, recorded: Between | None = None, counts: bool = True) -> None:
        super().__init__()
        self.counter, self.between, recorded = Counter(), between, recorded or between
        self.first, self.block, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.aux = torch.zeros(())
        self.steps = nn.ModuleList(
            [
                Step(lambda counter, first, x: first(counter(x) if counts else x), self.counter, self.first),
                Step(lambda block, last, x: _ended(recorded, block, last, x), self.block, self.last),
                nn.Identity(),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.counter(x))
        self.aux = x.square().mean()
        return _ended(self.between, self.block, self.last, x)


def _ended(between: Between, block: nn.Module, last: nn.Module, x: Tensor) -> Tensor:
    return last(F.dropout(between(block, x), 0.5, last.training))


def first_of(function: Callable[[Tensor], Any], use: Callable[[Tensor, Any], Tensor]) -> Between:
    """Use a value of the first micro-batch for all of them."""
    kept: list[Any] = []

    def between(block: nn.Module, x: Tensor) -> Tensor:
        x = block(x)
        kept.append(function(x.detach()))
        return use(x, kept[0])

    return between


def plain(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def quantized(block: nn.Module, x: Tensor) -> Tensor:
    x = block(x)
    return x + (x.round() - x).detach()


def branching(block: nn.Module, x: Tensor) -> Tensor:
    return block(x) * 2 if type(block) is nn.Linear else block(x)


def counted(block: nn.Module, x: Tensor) -> Tensor:
    x = block(x)
    return x + x[x > 0.3].sum() / (x > 0.3).sum()


def masked(block: nn.Module, x: Tensor) -> Tensor:
    return block(x) * (block(x).detach() > 0)


def routed(block: nn.Module, x: Tensor) -> Tensor:
    return x + block(x)


WRONG: dict[str, Callable[[], Net]] = {
    "the gradient of a custom function is lost": lambda: Net(quantized, lambda b, x: b(x).round()),
    "another branch was recorded": lambda: Net(branching, plain),
    "a size that depends on values is frozen": lambda: Net(
        counted, first_of(lambda x: int((x > 0.3).sum()), lambda x, count: x + x[x > 0.3].sum() / count)
    ),
    "a closure is that of the first micro-batch": lambda: Net(
        masked, first_of(lambda x: x > 0, lambda x, mask: x * mask)
    ),
    "an expert is never called": lambda: Net(routed, lambda b, x: x),
    "a buffer is not written": lambda: Net(plain, counts=False),
    "layers get no gradient": lambda: Net(plain, lambda b, x: b(x).detach().requires_grad_()),
    "an override is skipped": lambda: Net(lambda b, x: b(x) + 1e-3, plain),
}


def check(model: nn.Module, **options: Any) -> pipepart.CheckReport:
    x, y = faults.batch()
    given: dict[str, Any] = {"target": y, "loss_fn": nn.CrossEntropyLoss(), "steps": 2}
    given |= {"schedules": ["1f1b"], "dtypes": ["float64"], "micro_batches": 2}
    return pipepart.check(model, x, **given | options)


@pytest.fixture(autouse=True)
def _chains_of_nets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the chain of a Net from the layers that it names."""

    def chain_of(model: Any, *args: Any, **options: Any) -> Chain:
        if not isinstance(model, Net):
            return right(model, *args, **options)
        return Chain(model, [(f"steps.{name}", layer) for name, layer in model.steps.named_children()])

    right = training.chain_of
    for place in ("compare", "training"):
        monkeypatch.setattr(f"pipepart.verify.{place}.chain_of", chain_of)


@pytest.mark.parametrize("between", [plain, quantized, counted, branching, masked, routed])
def test_layers_that_compute_what_the_model_does_are_the_same_draws_included(between: Between) -> None:
    report = check(Net(between))
    assert report.ok
    assert report.plain[0].draws == ("steps.1",)
    assert report.plain[0].draws_match


@pytest.mark.parametrize("what", WRONG)
def test_layers_that_compute_something_else_are_found(what: str) -> None:
    torch.manual_seed(0)
    report = check(WRONG[what]())
    assert not report.ok
    assert report.rows[0].layer


def test_a_loss_that_reads_what_the_forward_leaves_on_the_model() -> None:
    net = Net(plain)
    report = check(net, loss_fn=lambda out, y: F.cross_entropy(out, y) + 0.1 * net.aux, reduction="mean")
    assert not report.ok


def test_a_loss_that_takes_parameters_of_the_model_takes_those_of_its_copies() -> None:
    net = Net(plain).eval()

    def penalized(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) + 0.1 * net.last.weight.square().sum()

    report = check(net, loss_fn=penalized, reduction="mean")
    assert report.ok
    assert (report.rows[0].mini_batch or 0) < 1e-12
    plainly = check(net, steps=2).rows[0]
    assert (plainly.ok, plainly.gradients) == (True, 0)


def test_more_draws_than_the_layers_make_are_said() -> None:
    net = Net(plain)
    net.steps[2] = nn.Dropout(0.5)
    report = check(net)
    assert (report.ok, report.plain[0].draws_match) == (False, False)
    assert any("more or less often" in note for note in report.plain[0].notes)
