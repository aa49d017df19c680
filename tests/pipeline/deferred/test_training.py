"""Pipelines of models without memory for their parameters: each stage initializes its own, or refuses to start."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipepart import Arguments, CaptureError, Pipeline, check, deferred_init
from pipepart.capture import RecordedChain
from tests.capture.families import FAMILIES
from tests.support.chains import cut_by_hand
from tests.support.deferred import Tied, deferred, initialize, pipelines, reset_parameters
from tests.support.recorded import borders_of, chain_for

pytestmark = pytest.mark.usefixtures("short_profiles")

LOSS, CLASSES = nn.functional.mse_loss, nn.functional.cross_entropy
WORDS = torch.randint(12, (8,))


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def trained(pipe: Pipeline, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Losses, gradients of the last step and the state after it."""
    optimizer = torch.optim.Adam(pipe.parameters())
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        losses.append(pipe.step(x, target=y))
        optimizer.step()
    return losses + [p.grad for p in pipe.parameters() if p.grad is not None] + [*pipe.state_dict().values()]


@pytest.mark.parametrize("strict", [False, True])
def test_training_of_a_recorded_model(strict):
    batches = [(torch.randint(12, (8,)), torch.randint(12, (8,))) for _ in range(3)]
    plain, pipe = pipelines(Tied, batches[0][0], loss_fn=CLASSES, strict=strict)
    with plain, pipe:
        found, expected = trained(pipe, batches), trained(plain, batches)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "mixtral", "t5"])
def test_models_of_transformers_have_an_initializer(family):
    """It gives the same values for every cut, as widely spread as those of the constructor."""
    model: Any

    def initialized(module: nn.Module) -> None:
        reset_parameters(module)
        model._init_weights(module)

    make, sample = FAMILIES[family]
    torch.manual_seed(0)
    chain, states = chain_for(make(), sample()), []
    for stages in (2, 3):
        with torch.device("meta"):
            model = make()
        torch.manual_seed(1)
        own, borders = RecordedChain(model, chain.groups), borders_of(len(chain.layers), stages)
        with cut_by_hand(own, borders, micro_batches=2, initialize=initialized) as pipe:
            states.append({name: tensor.clone() for name, tensor in pipe.state_dict().items()})
            assert torch.isfinite(pipe.step(Arguments.of(sample())))
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    spread = {name: tensor.std() for name, tensor in make().named_parameters() if tensor.numel() > 200}
    assert spread
    for name, expected in spread.items():
        torch.testing.assert_close(states[0][name].std(), expected, rtol=0.25, atol=1e-6, msg=name)


def test_parameters_stay_the_same_objects():
    model = deferred(Tied)
    weight: Any = model.get_parameter("embed.weight")
    weight.tag = "mine"
    weight.register_hook(lambda gradient: gradient * 0)
    model.get_submodule("blocks.2").requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    same = RecordedChain(model, chain_for(Tied(), WORDS, loss_fn=CLASSES).groups, split_loss=False)
    with cut_by_hand(same, [1, 3], loss_fn=CLASSES, micro_batches=2, initialize=initialize) as pipe:
        assert pipe.module is model
        assert model.get_parameter("embed.weight") is weight is model.get_parameter("head.weight")
        assert type(weight) is nn.Parameter
        assert vars(weight)["tag"] == "mine"
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        pipe.step(WORDS, target=WORDS)
        optimizer.step()
        after = pipe.state_dict()
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed.isdisjoint({"embed.weight", "head.weight", "spare", "blocks.2.0.weight"})
        assert "blocks.1.0.weight" in changed


def filled(model: nn.Module, initialize: Any = initialize, border: int = 1) -> nn.Module:
    """Make a pipeline of a sequential model, with two stages; return the model."""
    cut_by_hand(model, [border], loss_fn=LOSS, initialize=initialize).close()
    return model


def test_reset_parameters_initializes_layers_of_torch():
    with torch.device("meta"):  # without values of buffers, too
        model = nn.Sequential(nn.Linear(4, 400), nn.BatchNorm1d(400), nn.MultiheadAttention(8, 2))
    state = filled(model, reset_parameters).state_dict()
    bound = state["0.weight"].abs().max()
    assert 0.9 / 2 < bound <= 1 / 2  # 1 / sqrt(4)
    assert torch.equal(state["1.running_var"], torch.ones(400))
    assert state["1.num_batches_tracked"] == 0
    assert torch.equal(state["2.out_proj.bias"], torch.zeros(8))


def test_values_do_not_depend_on_the_cut_and_follow_the_seed():
    found = []
    for seed, border in ((0, 1), (0, 2), (1, 1)):
        model = deferred(perceptron)
        torch.manual_seed(seed)
        found.append((filled(model, reset_parameters, border).state_dict(), torch.rand(1)))
    (first, draw), (same, same_draw), (other, _) = found
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    assert not torch.equal(first["0.weight"], first["2.weight"])
    assert torch.equal(draw, same_draw)


class Scaled(nn.Linear):
    """Has a parameter of its own, which ``reset_parameters`` of its base class does not know."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.ones(4))


class Masked(nn.Linear):
    """Has buffers with integers and truth values."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("places", torch.arange(4))
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))


class WithTable(nn.Linear):
    """Has tensors in an attribute."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.table = [torch.rand(4)]


def square() -> nn.Linear:
    return nn.Linear(4, 4)


@torch.no_grad()
def half(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight[:2] = 1.0
        module.bias.zero_()


@torch.no_grad()
def times_two(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.mul_(2)


def weights_only(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight.data.normal_()


@pytest.mark.parametrize(
    ("layer", "how", "message"),
    [
        (square, None, r"parameter '0.weight' is on the meta device.*initialize=.*weights=.*to_empty"),
        (Scaled, reset_parameters, r"nothing initializes parameter '0.scale'"),
        (square, weights_only, r"nothing initializes parameter '0.bias'"),
        (square, half, r"nothing initializes parameter '0.weight'"),
        (square, times_two, r"nothing initializes parameter '0.weight'"),
        (Masked, reset_parameters, r"nothing initializes buffer '0.places'"),
        (WithTable, initialize, r"attribute '0.table' is on the meta device: register it as a buffer"),
    ],
)
def test_a_tensor_that_nothing_initializes_is_refused(layer, how, message):
    with torch.device("meta"):
        model = nn.Sequential(layer(), nn.Linear(4, 4))
    with pytest.raises(CaptureError, match=message):
        filled(model, how)
    if how is None:
        with pytest.raises(CaptureError, match=message):
            Pipeline.auto(model, torch.randn(4, 4), target=torch.randn(4, 4), loss_fn=LOSS)


def test_buffers_keep_their_values_under_deferred_init_and_an_initializer_may_bind_them_anew():
    def rebind(module: nn.Module) -> None:
        initialize(module)
        if isinstance(module, Masked):
            module.places, module.mask = torch.arange(4) * 2, torch.zeros(4, dtype=torch.bool)

    with deferred_init():
        model = nn.Sequential(Masked(), nn.Linear(4, 4)).to(torch.float64)
    filled(model)
    assert torch.equal(model.get_buffer("0.places"), torch.arange(4))
    assert model.get_buffer("0.mask").all()
    assert model.get_parameter("0.weight").dtype is torch.float64
    with torch.device("meta"):
        model = nn.Sequential(Masked(), nn.Linear(4, 4))
    filled(model, rebind)
    assert torch.equal(model.get_buffer("0.places"), torch.tensor([0, 2, 4, 6]))


def test_an_error_of_an_initializer_names_the_module():
    def broken(module: nn.Module) -> None:
        raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError, match="on purpose") as caught:
        filled(deferred(perceptron), broken)
    assert caught.value.__notes__ == ["pipepart: while module '0' was initialized"]


def test_what_cannot_be_initialized_safely_is_refused():
    some = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).to("meta"))
    with pytest.raises(
        CaptureError, match=r"parameter '0.weight' has values and parameter '1.weight' has none"
    ):
        filled(some)
    with pytest.raises(TypeError, match="initialize must be a function of a module"):
        filled(perceptron(), "normal")
    model = deferred(perceptron)
    held = model(torch.empty(2, 4, device="meta", requires_grad=True))
    with pytest.raises(CaptureError, match=r"parameter '0.weight' cannot get values.*before a forward"):
        filled(model)
    assert held.is_meta


def test_auto_and_check():
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    model = deferred(perceptron)
    with pytest.raises(ValueError, match=r"on the meta device.*pipe\.module"):
        check(model, x, target=y, loss_fn=LOSS)
    with Pipeline.auto(model, x, target=y, loss_fn=LOSS, devices=2, initialize=initialize) as pipe:
        expected = LOSS(model(x), y).detach()
        torch.testing.assert_close(pipe.step(x, target=y), expected)
