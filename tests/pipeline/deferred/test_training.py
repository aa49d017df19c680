"""Pipelines of deferred models: they train as the pipeline of the plainly constructed model does, bit for bit."""

import pytest
import torch
from torch import Tensor, nn

from pipepart import Arguments, CaptureError, Pipeline, Roofline, check, deferred_init, profile
from pipepart.capture import RecordedChain
from tests.capture.families import FAMILIES
from tests.support.chains import cut_by_hand, plan_by_hand
from tests.support.deferred import Tied, pipelines, twins
from tests.support.recorded import chain_for, differing

SPEED = Roofline.parse("cpu: 50 GFLOP/s, 10 GB/s")


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
    plain, pipe = pipelines(Tied, batches[0][0], loss_fn=nn.functional.cross_entropy, strict=strict)
    with plain, pipe:
        found, expected = trained(pipe, batches), trained(plain, batches)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    "family", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral", "whisper"))]
)
def test_step_of_families(family):
    make, sample = FAMILIES[family]
    plain, pipe = pipelines(make, sample())
    with plain, pipe:
        assert torch.equal(pipe.step(Arguments.of(sample())), plain.step(Arguments.of(sample())))
        assert differing(pipe.module, plain.module) == []


def test_parameters_stay_the_same_objects():
    with deferred_init():
        model = Tied()
    weight, table = model.embed.weight, model.table
    weight.tag = "mine"  # type: ignore[attr-defined]
    weight.register_hook(lambda gradient: gradient * 0)
    model.blocks[2].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randint(12, (8,))
    chain = chain_for(Tied(), x, loss_fn=nn.functional.cross_entropy)
    plan = plan_by_hand([name for name, _ in chain.layers], [1, 3], micro_batches=2)
    same = RecordedChain(model, chain.groups, split_loss=False)
    with Pipeline(same, plan, nn.functional.cross_entropy) as pipe:  # type: ignore[arg-type]
        assert pipe.module is model
        assert model.embed.weight is weight is model.head.weight
        assert type(weight) is nn.Parameter
        assert weight.tag == "mine"  # type: ignore[attr-defined]
        assert model.table is table
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers(), table))
        before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        pipe.step(x, target=x)
        optimizer.step()
        after = pipe.state_dict()
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed.isdisjoint({"embed.weight", "head.weight", "spare", "blocks.2.0.weight"})
        assert "blocks.1.0.weight" in changed
        pipe.load_state_dict(before)
        assert all(torch.equal(before[name], tensor) for name, tensor in pipe.state_dict().items())


def test_models_with_unknown_values_are_refused():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = plan_by_hand(["0", "1"], [1], micro_batches=2)
    with pytest.raises(CaptureError, match=r"parameter '0.weight'.*deferred_init.*weights=.*to_empty"):
        Pipeline(model, plan, nn.functional.mse_loss)
    with pytest.raises(CaptureError, match=r"parameter '0.weight'"):
        Pipeline.auto(model, torch.randn(4, 4), target=torch.randn(4, 4), loss_fn=nn.functional.mse_loss)


class Scaled(nn.Linear):
    """Scales by a tensor that no attribute of the module holds."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        scale = torch.rand(4)
        self.scaled = lambda y: y * scale

    def forward(self, input: Tensor) -> Tensor:
        return self.scaled(super().forward(input))


def test_a_tensor_in_a_closure_is_named_as_the_reason():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Scaled() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    x, y = torch.randn(4, 4), torch.randn(4, 4)
    plain, pipe = pipelines(Model, x, loss_fn=nn.functional.mse_loss)
    with plain, pipe:
        plain.step(x, target=y)
        with pytest.raises(CaptureError, match=r"'blocks\.0' uses tensors .* closures.* as buffers"):
            pipe.step(x, target=y)


@pytest.mark.filterwarnings("error:.*another tensor", "ignore:.*weight_norm:FutureWarning")
def test_parameters_that_a_weight_norm_holds_stay_the_same_objects():
    with deferred_init():
        model = nn.Sequential(*(nn.utils.weight_norm(nn.Linear(3, 3)) for _ in range(3)))
    parameters = list(model.parameters())
    with cut_by_hand(model, [1], loss_fn=nn.functional.mse_loss) as pipe:
        pipe.step(torch.randn(6, 3), target=torch.randn(6, 3))
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))


def test_a_parameter_that_a_graph_holds_is_replaced():
    torch.manual_seed(0)
    with deferred_init():
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    held = model(torch.empty(2, 3, device="meta", requires_grad=True))
    torch.manual_seed(0)
    expected = nn.Linear(3, 3).weight
    with pytest.warns(UserWarning, match=r"0\.weight is another tensor"):
        pipe = cut_by_hand(model, [1], loss_fn=nn.functional.mse_loss)
    with pipe:
        assert torch.equal(next(pipe.parameters()), expected)
        pipe.step(torch.randn(6, 3), target=torch.randn(6, 3))
    assert held.is_meta


class Recurrent(nn.Module):
    """Takes the last state of an LSTM, which keeps its parameters in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.unsqueeze(1).expand(-1, 2, -1))[0][:, -1]


@pytest.mark.parametrize("replicas", [1, 2])
def test_recurrent_layers_and_replicas(replicas):
    plain, model = twins(lambda: nn.Sequential(Recurrent(), nn.Linear(4, 3)))
    parameters = list(model.parameters())
    x, y = torch.randn(6, 3), torch.randn(6, 3)
    losses = []
    for one in (plain, model):
        with cut_by_hand(
            one, [1], loss_fn=nn.functional.mse_loss, micro_batches=4, replicas=replicas
        ) as pipe:
            losses.append(pipe.step(x, target=y))
    assert torch.equal(*losses)
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert differing(model, plain) == []


def test_auto_and_check():
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    plain, model = twins(perceptron)
    with pytest.raises(ValueError, match=r"on the meta device.*pipe\.module"):
        check(model, x, target=y, loss_fn=nn.functional.mse_loss)
    with Pipeline.auto(model, x, target=y, loss_fn=nn.functional.mse_loss, devices=2) as pipe:
        assert torch.equal(model.get_parameter("0.weight"), plain.get_parameter("0.weight"))
        torch.testing.assert_close(pipe.step(x, target=y), nn.functional.mse_loss(plain(x), y).detach())


class Counting(nn.Linear):
    """Adds up its inputs in an attribute, which is in no state dict."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.seen = torch.ones(4)

    def forward(self, input: Tensor) -> Tensor:
        self.seen.add_(input.detach().sum(0))
        return super().forward(input) * self.seen


@pytest.mark.parametrize("measure", [False, True])
def test_a_forward_may_write_attributes_while_it_is_profiled(measure):
    x = torch.randn(8, 4)
    with deferred_init():
        layers = Counting(), Counting()
        model = nn.Sequential(*layers)
    profile(model, x, measure=measure, roofline=None if measure else SPEED, seconds=0)
    with cut_by_hand(model, [1], micro_batches=1):
        assert all(torch.equal(layer.seen, torch.ones(4)) for layer in layers)
