"""``pipepart.check`` finds faults of layers, losses and pipelines, and layers that are not those of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipepart
from pipepart import Pipeline
from pipepart.capture import Chain
from pipepart.verify import DifferentNumbers, training
from tests.support.two_parts import Calls
from tests.verify import faults

pytestmark = pytest.mark.usefixtures("short_profiles")


@pytest.mark.parametrize(
    ("layer", "what"),
    [
        (faults.forward_of_main_thread(1.0), "its output, step 0"),
        (faults.forward_of_main_thread(float("nan")), "its output, step 0"),
        (faults.backward_of_main_thread(), "the gradient of its input, step 0"),
        (faults.buffer_of_main_thread(), "2.seen, step 0"),
    ],
)
def test_a_layer_that_does_something_else_on_a_workers_thread(layer: nn.Module, what: str) -> None:
    report = faults.checked(faults.chain(layer))
    assert len(report.rows) == 3
    for row in report.rows:
        assert not row.ok
        assert not row.same
        assert (row.layer, row.kind, row.what) == ("2", "Calls", what)
        assert row.repeats
    with pytest.raises(DifferentNumbers, match=r"1f1b in float64: layer '2' \(Calls\) is the first"):
        report.raise_if_different()


def test_a_layer_whose_backward_knows_the_last_micro_batch_only() -> None:
    """Of two devices the first has several micro-batches in flight."""
    report = faults.checked(faults.chain(faults.one_in_flight()), schedules=["sequential", "gpipe", "1f1b"])
    assert [(row.schedule, row.layer, row.what) for row in report.rows if not row.ok] == [
        (name, "2", "the gradient of its input, step 0") for name in ("gpipe", "1f1b")
    ]


def test_a_count_of_the_layers_own_is_right_unless_its_forward_runs_twice() -> None:
    report = faults.checked(
        faults.chain(faults.OwnCount()), schedules=["1f1b"], recompute=["never", "always"]
    )
    once, twice = report.rows
    assert once.same
    assert (twice.layer, twice.ok) == ("2", False)


def test_a_count_outside_of_the_model_makes_two_plain_runs_differ() -> None:
    report = faults.checked(faults.chain(faults.shared_count()), schedules=["1f1b"])
    assert (report.ok, report.rows[0].layer, report.rows[0].repeats) == (False, "2", False)
    assert "Two plain runs" in report.rows[0].text


def test_a_layer_that_cannot_be_copied_is_named() -> None:
    with pytest.raises(TypeError, match=r"layer '2' \(Identity\) cannot be copied.*__deepcopy__"):
        faults.checked(faults.chain(faults.uncopied()))


def test_a_mean_that_is_said_to_be_a_sum() -> None:
    """One that can be followed is refused."""
    for row in faults.checked(faults.chain(), loss_fn=faults.mean, reduction="sum").rows:
        assert (row.ok, row.same, row.layer) == (False, True, "loss")
        assert row.mini_batch == pytest.approx(0.75)  # four times the loss
        assert "declare reduction='mean', 'sum' or 'batch'" in row.text
    with pytest.raises(pipepart.LossError, match="is a mean over samples, and reduction=sum is declared"):
        faults.checked(faults.chain(), loss_fn=nn.CrossEntropyLoss(), schedules=["1f1b"], reduction="sum")


def test_a_loss_that_is_no_mean_though_it_is_said_to_be_one() -> None:
    """Of a function, and of the model itself."""
    given: dict[str, Any] = {"schedules": ["1f1b"], "reduction": "mean"}
    (row,) = faults.checked(faults.chain(), loss_fn=faults.root_mean_square, **given).rows
    assert (row.ok, row.layer) == (False, "loss")
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), Calls(lambda x: x.square().sum()))
    given |= {"target": None, "loss_fn": None}
    (row,) = faults.checked(model, **given).rows
    assert (row.ok, row.layer, row.kind) == (False, "loss", "")
    (row,) = faults.checked(model, **{**given, "reduction": "sum"}).rows
    assert row.ok


class LosesAGradient(Pipeline):
    """Forgets the gradient of the first parameter, which the last layer may share."""

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        loss = super().step(*args, target=target, **kwargs)
        next(self.parameters()).grad = None
        return loss


class OneMoreStep(Pipeline):
    """Runs the last micro-batch of each mini-batch twice."""

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        (x,) = pipepart.Arguments.of(args[0]).args
        super().step(x[-3:], target=target[-3:])
        return super().step(*args, target=target, **kwargs)


def test_a_pipeline_that_loses_a_gradient_or_counts_a_micro_batch_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipepart.verify.compare.Pipeline", LosesAGradient)
    embedding, head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
    head.weight = embedding.weight
    tokens = torch.randint(10, (12,))
    report = pipepart.check(
        nn.Sequential(embedding, nn.Tanh(), head),
        tokens,
        target=tokens,
        loss_fn=nn.CrossEntropyLoss(),
        devices=1,
        dtypes=["float64"],
        steps=1,
    )
    assert {(row.ok, row.layer, row.what) for row in report.rows} == {
        (False, "0", "the gradient of 0.weight, step 0")
    }
    monkeypatch.setattr("pipepart.verify.compare.Pipeline", OneMoreStep)
    (row,) = faults.checked(faults.chain(), schedules=["1f1b"], steps=1).rows
    assert not row.ok
    assert row.losses == 0
    assert row.layer


Between = Callable[[nn.Module, Tensor], Tensor]


class Net(nn.Module):
    """A model, and the layers that a recording is said to have made of it: ``steps``."""

    def __init__(self, between: Between, recorded: Between | None = None, counts: bool = True) -> None:
        super().__init__()
        self.between, recorded = between, recorded or between
        self.counter = Calls(lambda x, seen: (seen.add_(1), x)[1], seen=nn.Buffer(torch.zeros(())))
        self.first, self.block, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.aux = torch.zeros(())
        begin = {"counter": self.counter, "first": self.first}
        end = {"block": self.block, "last": self.last}
        self.steps = nn.ModuleList(
            [
                Calls(lambda x, counter, first: first(counter(x) if counts else x), **begin),
                Calls(lambda x, block, last: _ended(recorded, block, last, x), **end),
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


def check(net: Net, **options: Any) -> pipepart.CheckReport:
    return faults.checked(net, **{"schedules": ["1f1b"], "micro_batches": 2} | options)


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
