"""The first number of a step that is not finite is named with the layer that made it, whichever worker saw it first."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipepart import Pipeline
from tests.support.chains import plan_by_hand
from tests.support.pairwise import pairwise
from tests.support.two_parts import Calls

MARK = 1e9  # a sample of such numbers makes a layer go wrong


class Wrong(nn.Module):
    """Passes its input on, times a weight of one; goes wrong in ``where`` for a sample that is marked."""

    def __init__(self, where: str, factor: float = math.inf) -> None:
        super().__init__()
        self.where, self.factor = where, factor
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        if not bool((x.detach().abs() > 1e3).any()):
            return y
        if self.where == "output":
            return y * self.factor
        if self.where == "gradient of its input" and x.requires_grad:
            x.register_hook(lambda gradient: gradient * self.factor)
        if self.where == "gradient of its parameter":
            weight = self.weight * 1
            weight.register_hook(lambda gradient: gradient * self.factor)
            return y + weight
        return y


def identity() -> nn.Linear:
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(4))
    return layer


def network(**wrong: nn.Module) -> nn.Sequential:
    layers: list[nn.Module] = [identity() for _ in range(6)]
    for place, layer in wrong.items():
        layers[int(place.removeprefix("at_"))] = layer
    return nn.Sequential(*layers)


def guarded(model: nn.Module, loss_fn: Any = None, chunks: int = 1, **how: Any) -> Pipeline:
    names = [str(index) for index in range(6)]
    borders = [2, 4] if chunks == 1 else [1, 2, 4]
    optimizer = how.pop("optimizer", None)
    plan = plan_by_hand(names, borders, micro_batches=4, chunks=chunks, **how)
    return Pipeline(model, plan, loss_fn or nn.MSELoss(), nan_guard=True, optimizer=optimizer)


def batch(*marked: int) -> tuple[Tensor, Tensor]:
    """Two samples a micro-batch, those of some marked."""
    x = torch.linspace(-1, 1, 32).view(8, 4).clone()
    for micro_batch in marked:
        x[2 * micro_batch + 1] = MARK
    return x, torch.zeros(8, 4)


HOW: list[dict[str, Any]] = [
    {"schedule": "1f1b"},
    {"schedule": "zb-h1"},
    {"schedule": "interleaved-1f1b", "chunks": 2},
    {"schedule": "gpipe", "recompute": "always"},
]


@pytest.mark.parametrize(
    ("how", "where", "position"),
    pairwise(HOW, ["output", "gradient of its input", "gradient of its parameter"], [0, 3, 5]),
)
def test_the_layer_and_the_micro_batch_and_what_it_was(how, where, position):
    wrong = Wrong(where)
    x, y = batch(2)
    with guarded(network(**{f"at_{position}": wrong}), **how) as pipe:
        with pytest.raises(FloatingPointError) as caught:
            pipe.step(x.clone().requires_grad_(), target=y)
        text = str(caught.value)
        assert text.startswith(f"layer '{position}' (Wrong) made an infinite number in ")
        assert f"its {where}" in text or f"the {where}" in text
        assert "on virtual:" in text
        if where != "gradient of its parameter":  # which is a sum over the micro-batches
            assert text.endswith("micro-batch 2")


@pytest.mark.parametrize(
    ("where", "first"),
    [
        (
            "gradient of its input",
            r"^layer '1' \(Wrong\) made an infinite number in the gradient .*micro-batch 1$",
        ),
        ("gradient of its parameter", r"^the mini-batch has nan in its input; .*micro-batch 3$"),
    ],
)
def test_first_is_what_plain_training_would_come_to_first(where, first):
    """GPipe makes the outputs of micro-batch 3 before the gradients of micro-batch 1; parameters come last."""
    x, y = batch(1)
    x[7] = math.nan  # in the mini-batch itself
    with (
        guarded(network(at_1=Wrong(where)), schedule="gpipe") as pipe,
        pytest.raises(FloatingPointError, match=first),
    ):
        pipe.step(x, target=y)


@pytest.mark.parametrize(
    ("entry", "number", "message"),
    [
        (0, math.nan, r"^the mini-batch has nan in its input; .* micro-batch 1$"),
        (1, math.inf, r"^the loss made an infinite number, .*; micro-batch 1$"),
    ],
    ids=["input", "target"],
)
def test_the_mini_batch_and_the_loss_are_named_as_well(entry, number, message):
    given = batch()
    given[entry][3] = number
    x, y = given
    with guarded(network()) as pipe, pytest.raises(FloatingPointError, match=message):
        pipe.step(x, target=y)


def test_a_mask_of_minus_infinity_goes_through():
    masks = Calls(lambda x: (x, torch.zeros(x.shape).masked_fill(x > 0, -math.inf)))
    softmax = Calls(lambda two: torch.softmax(torch.cat([two[0] + two[1], torch.zeros(2, 1)], 1), 1)[:, :4])
    x, y = batch()
    with guarded(network(at_2=masks, at_3=softmax)) as pipe:
        assert bool(pipe.step(x, target=y).isfinite())


def test_under_a_scaler_gradients_may_overflow_and_outputs_may_not():
    scaler = torch.amp.GradScaler("cpu")
    x, y = batch(2)
    with guarded(network(at_2=Wrong("gradient of its parameter"))) as pipe:
        pipe.step(x, target=y, scaler=scaler)
        assert not bool(pipe.module.get_parameter("2.weight").grad.isfinite().all())  # type: ignore[union-attr]
    with (
        guarded(network(at_2=Wrong("output"))) as pipe,
        pytest.raises(FloatingPointError, match="layer '2'"),
    ):
        pipe.step(x, target=y, scaler=scaler)


def test_no_optimizer_of_a_stage_steps_by_such_gradients():
    model = network(at_2=Wrong("gradient of its parameter"))
    before = [parameter.detach().clone() for parameter in model[2:4].parameters()]
    x, y = batch(2)
    with (
        guarded(model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)) as pipe,
        pytest.raises(FloatingPointError, match="layer '2'"),
    ):
        pipe.step(x, target=y)
    for parameter, value in zip(model[2:4].parameters(), before, strict=True):
        assert parameter.equal(value)


def test_in_the_place_of_the_model():
    x, _ = batch(2)
    wrong = Wrong("output")
    with guarded(network(at_3=wrong)) as pipe:
        with torch.no_grad(), pytest.raises(FloatingPointError, match="layer '3'"):
            pipe(x)
        wrong.where = "gradient of its parameter"
        output = pipe(x)
        with pytest.raises(FloatingPointError, match=r"gradient of its parameter '3\.weight'"):
            output.sum().backward()
