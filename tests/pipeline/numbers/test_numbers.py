"""What training scripts do between steps, and models that only some pipelines get right, in both kinds of pipelines."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pipeline.conformance.layers import Double
from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.in_backward import CallsInBackward
from tests.support.tied import language_model, loss_fn, words

each_kind = pytest.mark.parametrize("strict", [False, True], ids=["free", "strict"])
LOSS = nn.MSELoss()
X, Y = torch.randn(2, 6, 4)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def test_a_layer_may_write_over_its_input_but_not_over_what_another_layer_has_saved():
    """A sigmoid needs its output in its backward; the user's input stays for a second forward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), Double())
    with (
        cut_by_hand(model, [2], loss_fn=LOSS) as pipe,
        pytest.raises(RuntimeError, match="inplace operation"),
    ):
        pipe.step(X, target=Y)
    x = X.clone()
    with cut_by_hand(nn.Sequential(Double(), nn.Linear(4, 4)), [1], loss_fn=LOSS, recompute="always") as pipe:
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
        return CallsInBackward.apply(x, partial(self.seen.append, 1))


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
