"""Which modules become layers, what is known of them, and copies that share nothing with the original."""

import copy
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipepart
from pipepart import LossError
from pipepart.capture import CaptureError, LayerGraph, SharedTensor, TensorSpec, chain_of, describe, flatten
from pipepart.capture.deep_copies import deep_copies
from tests.support.recorded import assert_that_of_the_whole, chain_for

pytestmark = pytest.mark.usefixtures("short_profiles")


X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


class Body(nn.Module):
    """Layers under layer_names of their own, and a sum around them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x) * self.scale)
        return x + self.third(torch.tanh(self.second(y)))


class Whole(nn.Module):
    """Nearly all of it in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Linear(6, 6), Body()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.stem(x))


class Iterated(nn.Module):
    """Calls the parts of its Sequential one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.parts = nn.ModuleDict({"all": nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))})

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for part in self.parts["all"].children():
            x = part(x)
        return x


class HoldsIterated(nn.Module):
    """Its only block is opened by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Iterated()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def layer_names(model: nn.Module, **options) -> list[str]:
    return [name for name, _ in chain_for(model, X, loss_fn=F.mse_loss, **options).layers]


OPENED = "Body opened (body): it has 76% of the parameters"
PARTS = ["body.stem", "body.parts.all.0", "body.parts.all.1", "body.parts.all.2"]


@pytest.mark.parametrize(
    ("make", "options", "expected", "notes"),
    [
        (Whole, {}, ["stem", "body.first", "body.second", "body.third"], (OPENED,)),
        (Whole, {"layers": ["body"]}, ["stem", "body"], ()),
        (HoldsIterated, {}, PARTS, None),
    ],
)
def test_the_layers_of_a_profile_are_those_of_a_recording_and_run(make, options, expected, notes):
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    profile = pipepart.profile(model, X, loss_fn=F.mse_loss, target=Y, seconds=0, **options)
    assert [layer.name for layer in profile.layers] == layer_names(make(), **options) == expected
    assert notes is None or profile.notes == notes
    plan = pipepart.plan(profile, pipepart.Cluster.virtual(2, threads=1), schedule="gpipe")
    with pipepart.Pipeline(model, plan, F.mse_loss) as pipe:
        loss = pipe.step(X, target=Y)
    assert_that_of_the_whole(model, plain, loss, F.mse_loss(plain(X), Y))


def test_an_unknown_layer():
    with pytest.raises(CaptureError, match="has no module 'middle'"):
        layer_names(Whole(), layers=["middle"])


def test_a_model_on_the_meta_device_has_the_layers_of_a_real_one():
    with torch.device("meta"):
        model = Whole()
    chain = pipepart.capture.chain_of(model, split_loss=False)
    assert isinstance(chain, pipepart.capture.RecordedChain)
    chain.bind((X.to("meta"),), {})
    assert [name for name, _ in chain.layers] == layer_names(Whole())


class Counts(nn.Module):
    """A model that cannot be recorded, as it counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 6), nn.Linear(6, 6)
        self.forwards = 0

    def forward(self, x: Tensor, scale: float = 1.0, labels: Tensor | None = None) -> Any:
        self.forwards += 1
        x = self.decoder(torch.tanh(self.encoder(x))) * scale
        return x if labels is None else {"loss": F.mse_loss(x, labels), "output": x}


@pytest.mark.parametrize(
    ("devices", "options"),
    [(1, {}), (1, {"schedule": "gpipe", "micro_batches": 4}), (2, {"replicas": 2, "micro_batches": 2})],
)
def test_a_model_that_is_one_layer_trains_without_a_recording(devices, options, tmp_path: Path):
    """Its plan, once saved, is that of such a model."""
    model, x, y = Counts().double(), X.double(), Y.double()
    plain = copy.deepcopy(model)
    batch = pipepart.Arguments(x, scale=2.0)
    with pipepart.Pipeline.auto(
        model, batch, target=y, loss_fn=F.mse_loss, layers=[""], devices=devices, **options
    ) as pipe:
        assert [stage.layers for stage in pipe.plan.stages] == [("Counts",)]
        pipe.plan.save(tmp_path / "plan.json")
    with pipepart.Pipeline(model, pipepart.Plan.load(tmp_path / "plan.json"), F.mse_loss) as pipe:
        before = model.forwards
        loss = pipe.step(x, scale=2.0, target=y)
        assert model.forwards > before  # the forward is the user's
        assert torch.equal(pipe(x), plain(x))
        assert pipe.state_dict().keys() == plain.state_dict().keys()
    assert_that_of_the_whole(model, plain, loss, F.mse_loss(plain(x, scale=2.0), y), rtol=1e-12, atol=1e-15)


def test_the_own_loss_of_such_a_model_needs_a_reduction():
    model = Counts().double()
    plain = copy.deepcopy(model)
    settings: dict[str, Any] = {"layers": [""], "devices": 1, "micro_batches": 4}
    batch: dict[str, Any] = {"x": X.double(), "labels": Y.double()}
    with (
        pipepart.Pipeline.auto(model, batch, **settings) as pipe,
        pytest.raises(LossError, match="reduction"),
    ):
        pipe.step(**batch)
    model.zero_grad()
    with pipepart.Pipeline.auto(model, batch, reduction="mean", **settings) as pipe:
        loss = pipe.step(**batch)
        assert torch.equal(pipe(**batch)["output"], plain(batch["x"]))
    assert_that_of_the_whole(model, plain, loss, plain(**batch)["loss"], rtol=1e-12, atol=1e-15)


def shapes(graph: LayerGraph) -> list[list[tuple[int, ...]]]:
    return [[spec.shape for spec in layer.outputs] for layer in graph.layers]


def test_chains_are_opened_unless_they_do_more_than_run_their_children():
    class Residual(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            return input + super().forward(input)

    class Named(nn.Sequential):
        pass

    relu, hooked = nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    hooked.register_forward_hook(lambda module, inputs, output: output.neg())
    named = Named(relu, nn.Sequential(relu))
    model = nn.Sequential(Residual(nn.Linear(2, 2), nn.ReLU()), named, hooked, nn.Sequential())
    assert [name for name, _ in flatten(model)] == ["0", "1.0", "1.1.0", "2", "3"]


def test_a_graph_is_a_chain_whose_edges_carry_tensors():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    )
    graph = pipepart.profile(model, torch.randn(5, 3, 8, 8), seconds=0).graph
    assert isinstance(graph, nx.DiGraph)
    assert list(graph.nodes) == ["0", "1", "2", "3", "4"]
    assert list(graph.edges) == [("0", "1"), ("1", "2"), ("2", "3"), ("3", "4")]
    assert graph.inputs == (TensorSpec(shape=(5, 3, 8, 8), dtype="float32"),)
    assert shapes(graph) == [[(5, 8, 8, 8)], [(5, 8, 8, 8)], [(5, 8, 4, 4)], [(5, 128)], [(5, 10)]]
    assert [graph.edges[edge]["bytes"] for edge in graph.edges] == [10240, 10240, 2560, 2560]
    assert graph.edges["2", "3"]["tensors"] == (TensorSpec(shape=(5, 8, 4, 4), dtype="float32"),)


def test_what_is_known_of_a_layer():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3).double()).to(torch.float64)
    model[0].requires_grad_(False)
    profile = pipepart.profile(model, torch.zeros(2, 7, dtype=torch.long), seconds=0)
    first, second = profile.layers
    assert (first.name, first.kind, first.description) == ("0", "Embedding", "Embedding(10, 4)")
    assert (first.parameter_bytes, first.gradient_bytes) == (10 * 4 * 8, 0)
    assert (second.parameter_bytes, second.gradient_bytes) == ((4 * 3 + 3) * 8, (4 * 3 + 3) * 8)
    assert first.outputs == (TensorSpec(shape=(2, 7, 4), dtype="float64"),)
    assert second.output_bytes == 2 * 7 * 3 * 8


def test_layers_that_share_state_are_known():
    linear, norm = nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)
    tied = nn.Linear(4, 4, bias=False)
    tied.weight = linear.weight
    layers = describe(nn.Sequential(linear, norm, linear, tied, norm, nn.ReLU()))
    assert [layer.shares_with for layer in layers] == [(), (), ("0",), ("0",), ("1",), ()]
    assert sum(layer.parameter_bytes for layer in layers) == 20 * 4
    assert [layer.buffer_bytes for layer in layers] == [0, 2 * 16 + 8, 0, 0, 0, 0]
    weight = SharedTensor(layer="0", name="weight", bytes=64, gradient_bytes=64)
    assert layers[2].shared == (weight, SharedTensor(layer="0", name="bias", bytes=16, gradient_bytes=16))
    assert layers[3].shared == (weight,)
    assert [tensor.name for tensor in layers[4].shared] == [
        "running_mean",
        "running_var",
        "num_batches_tracked",
    ]
    assert all(tensor.gradient_bytes == 0 for tensor in layers[4].shared)


class Centered(nn.Linear):
    @torch.no_grad()
    def mean(self, x):
        return x.mean()

    def forward(self, input):
        return super().forward(input - self.mean(input))


def test_a_mode_of_torch_around_methods_is_no_value_that_layers_share():
    assert [name for name, _ in chain_of(nn.Sequential(Centered(2, 2), Centered(2, 2))).layers] == ["0", "1"]


def test_a_recording_can_be_read():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

        def forward(self, x):
            return self.blocks[1](torch.tanh(self.blocks[0](x)) * 2)

    chain: Any = chain_of(Model())
    lines = str(chain.bind((torch.ones(1, 2),), {}).live.recording).splitlines()
    assert [line.partition("  #")[0] for line in lines] == [
        "inputs %0",
        "%1 = blocks.0(%0)",
        "%2 = tanh(%1)",
        "%3 = mul(%2, 2)",
        "%4 = blocks.1(%3)",
        "returns %4",
    ]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_the_backward_of_a_copy_of_torchscript_leaves_the_first_alone():
    """What is frozen is frozen in the copy."""
    scripted: Any = torch.jit.script(nn.Linear(4, 4))
    model = nn.Sequential(scripted, nn.Linear(4, 4))
    next(model.parameters()).requires_grad_(False)
    (twin,) = deep_copies(model)
    x = torch.randn(3, 4)
    assert twin(x).equal(model(x))
    twin(x).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.is_leaf for parameter in twin.parameters())
    assert [parameter.grad is None for parameter in twin.parameters()] == [True, False, False, False]
    assert not {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in twin.parameters()}
