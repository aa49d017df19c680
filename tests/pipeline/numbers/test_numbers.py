"""What scripts do between steps, models that few pipelines get right, and recomputation that nobody sees."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.pipeline.conformance.layers import double, writes_sometimes
from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.in_backward import calls_in_backward
from tests.support.tied import language_model, loss_fn, words
from tests.support.two_parts import Calls

each_kind = pytest.mark.parametrize("strict", [False, True], ids=["free", "strict"])
LOSS = nn.MSELoss()
X, Y = torch.randn(2, 6, 4)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def test_a_layer_may_write_over_its_input_but_not_over_what_another_layer_has_saved():
    """A sigmoid needs its output in its backward; the user's input stays for a second forward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), double())
    with (
        cut_by_hand(model, [2], loss_fn=LOSS) as pipe,
        pytest.raises(RuntimeError, match="inplace operation"),
    ):
        pipe.step(X, target=Y)
    x = X.clone()
    with cut_by_hand(nn.Sequential(double(), nn.Linear(4, 4)), [1], loss_fn=LOSS, recompute="always") as pipe:
        for _ in range(2):
            pipe.step(x, target=Y)
    assert x.equal(X)


def test_a_model_frozen_as_a_whole_gives_its_loss_and_no_gradient():
    model = network().requires_grad_(False)
    with cut_by_hand(model, [1], loss_fn=LOSS) as pipe:
        plain.assert_near(pipe.step(X, target=Y), LOSS(model(X), Y), 1e-6)
        assert not pipe(X).requires_grad
        assert pipe(X.clone().requires_grad_()).requires_grad
    assert all(gradient is None for gradient in plain.gradients(model).values())


@each_kind
def test_a_model_that_is_cut_again_and_again(strict):
    """With a parameter that stages share: layers that hold it were on other devices before."""
    model = language_model()
    x, y = words()
    for borders in ([1], [3, 5], [2]):
        with cut_by_hand(model, borders, loss_fn=loss_fn, strict=strict) as pipe:
            plain.check_step(pipe, x, y, loss_fn)
            if strict:
                assert pipe.memory()["virtual:0"].by_category["parameters"] > 0


@each_kind
def test_autocast_of_the_caller_holds_in_every_forward_and_in_no_backward(strict):
    """Inputs are cast for each use, as within a model: a layer that leaves autocast keeps full precision."""

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            first, second, third = (part(x) for part in self.parts)
            return first * second + third

    class Full(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(input.float())

    model = nn.Sequential(nn.Linear(32, 32), Full(32, 32), Three(), Full(32, 32), nn.Linear(32, 4))
    reference = plain.twin(model)
    options: dict[str, Any] = {"strict": strict, "recompute": ("never", "always", "except-last")}
    with cut_by_hand(model, [2, 3], loss_fn=LOSS, micro_batches=2, **options) as pipe:
        for kept, called in ((True, False), (False, False), (True, True)):
            x, y = torch.randn(8, 32), torch.randn(8, 4)
            context = torch.autocast("cpu", dtype=torch.bfloat16, enabled=kept)
            with context:
                loss = LOSS(pipe(x), y) if called else pipe.step(x, target=y)
            if called:
                loss.backward()
            for xs, ys in zip(x.tensor_split(2), y.tensor_split(2), strict=True):
                with context:
                    loss = LOSS(reference(xs), ys) / 2
                loss.backward()
            plain.assert_close(plain.gradients(model), plain.gradients(reference), 1e-6 if called else 0)


class Probe(nn.Module):
    """Notes each backward that comes through."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return calls_in_backward(x, partial(self.seen.append, 1))


@pytest.mark.parametrize(
    ("trained", "passed"),
    [(("5.weight", "5.bias", "7.weight", "7.bias"), [0, 0, 0, 3]), (("1.bias",), [0, 3, 3, 3])],
)
@pytest.mark.parametrize(
    ("schedule", "recompute"), [("1f1b", "always"), ("gpipe", "never"), ("zb-h1", "never")]
)
def test_what_is_frozen_in_front_runs_no_backward(schedule, recompute, trained, passed):
    """The last two of four layers train, or one bias alone, as in BitFit; a probe is in front of each layer."""
    model = nn.Sequential(*(module for _ in range(4) for module in (Probe(), nn.Linear(4, 4))))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    with cut_by_hand(model, [2, 4, 6], loss_fn=LOSS, schedule=schedule, recompute=recompute) as pipe:
        plain.check_step(pipe, X, Y, LOSS)
    assert [len(module.seen) for module in model.modules() if isinstance(module, Probe)] == passed


RECOMPUTED, TARGETS = torch.randn(2, 8, 3)


def test_a_micro_batch_whose_input_a_stage_writes_over_keeps_its_graph():
    """A second forward would have other values to begin with."""
    doubles = Calls(lambda x: (x.mul_(2) if x.mean() > 0 else x) * 1)
    model = plain.in_double([doubles, nn.Linear(3, 3), nn.Linear(3, 3)])
    x = torch.cat([-RECOMPUTED[:2].abs(), RECOMPUTED[2:].abs()]).double()
    reference = plain.twin(model)
    plain.micro_batched_step(reference, x.clone(), TARGETS.double(), LOSS, 4)
    with cut_by_hand(model, [2], loss_fn=LOSS, micro_batches=4, recompute="always") as pipe:
        pipe.step(x.clone(), target=TARGETS.double())
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


class Steps(nn.Module):
    """Counts its forwards, by whether they are to be differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(torch.is_grad_enabled())
        return x * 1


@pytest.mark.parametrize(("mode", "forwards"), [("never", 4), ("except-last", 7), ("always", 8)])
def test_how_often_a_layer_runs_and_the_loss_runs_once(mode, forwards):
    """And nothing runs twice where no backward is needed."""

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if output.device.type == "cpu":  # else it is called on no values, to see what its mean is of
            losses.append(len(output))
        return functional.mse_loss(output, target)

    def counts(call: Any) -> list[list[bool]]:
        """The forwards of both layers that count."""
        losses.clear()
        for one in counting:
            one.calls.clear()
        call()
        return [one.calls for one in counting]

    losses: list[int] = []
    counting = Steps(), Steps()
    model = nn.Sequential(nn.Linear(3, 3), counting[0], nn.Linear(3, 3), counting[1])
    with cut_by_hand(model, [2], loss_fn=loss_fn, micro_batches=4, recompute=mode, reduction="mean") as pipe:
        pipe.step(RECOMPUTED, target=TARGETS)
        assert counts(lambda: pipe.step(RECOMPUTED, target=TARGETS)) == [[True] * forwards] * 2
        assert losses.count(2) == 4  # beside a smaller one, to see what its mean is of
        assert counts(lambda: pipe(RECOMPUTED).sum().backward()) == [[True] * forwards] * 2
        model[0].requires_grad_(False)
        assert list(map(len, counts(lambda: pipe.step(RECOMPUTED, target=TARGETS)))) == [4, forwards]
        model.requires_grad_(False)
        assert list(map(len, counts(lambda: pipe.step(RECOMPUTED, target=TARGETS)))) == [4, 4]
        model.requires_grad_(True)
        with torch.no_grad():
            assert counts(lambda: pipe(RECOMPUTED)) == [[False] * 4] * 2


def test_batch_norm_that_changes_its_mode_between_steps():
    norm = nn.BatchNorm1d(3)
    model = nn.Sequential(nn.Linear(3, 3), norm, nn.Linear(3, 3))
    reference = plain.twin(model)
    with cut_by_hand(model, [1], loss_fn=LOSS, micro_batches=4, recompute="always") as pipe:
        for training in (False, True, False, True):
            norm.train(training)
            reference.get_submodule("1").train(training)
            pipe.step(RECOMPUTED, target=TARGETS)
            plain.micro_batched_step(reference, RECOMPUTED, TARGETS, LOSS, 4)
    assert norm.num_batches_tracked == 8
    plain.assert_same(plain.gradients(model), plain.gradients(reference))
    plain.assert_same(dict(model.named_buffers()), dict(reference.named_buffers()))


def check_first_write(schedule: str) -> None:
    """A buffer that is written from the third micro-batch of a step on, and read in all."""
    x, y = torch.randn(2, 8, 6).double()
    x[:4, 0], x[4:, 0] = -1, 1
    model = plain.in_double(
        [nn.Identity(), Calls(writes_sometimes, seen=nn.Buffer(torch.zeros(6))), nn.Linear(6, 6)]
    )
    reference = plain.twin(model)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    how: dict[str, Any] = {"micro_batches": 4, "schedule": schedule, "recompute": "always"}
    with cut_by_hand(model, [2], loss_fn=LOSS, **how) as pipe:
        for _ in range(2):
            pipe.step(ours, target=y)
            plain.micro_batched_step(reference, theirs, y, LOSS, 4)
    plain.assert_same({"input": ours.grad}, {"input": theirs.grad})
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_a_buffer_that_is_first_written_in_the_middle_of_a_step():
    """There is no copy at that micro-batch: its graph is kept. Others in flight would read a value that is gone."""
    check_first_write("sequential")
    with pytest.raises(RuntimeError, match=r"buffer 1\.\w+ was first written by a later micro-batch"):
        check_first_write("gpipe")


def test_a_buffer_that_is_written_through_another_reference_is_refused_by_name():
    class Hidden(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.all = [self.count]

        def forward(self, x: Tensor) -> Tensor:
            self.all[0].add_(1)
            return x * 1

    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Hidden()), nn.Linear(3, 3))
    with (
        cut_by_hand(model, [1], loss_fn=LOSS, recompute="always") as pipe,
        pytest.raises(RuntimeError, match=r"buffer 1\.0\.count was written .* updated twice") as caught,
    ):
        pipe.step(RECOMPUTED, target=TARGETS)
    assert "stage 1 of 2" in caught.value.__notes__[-1]
