"""``capture`` returns the graph of layers with names, shapes, types and bytes, without side effects."""

from collections import OrderedDict
from typing import Any

import networkx as nx
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipepart.capture import LayerGraph, SharedTensor, TensorSpec, capture, chain_of, flatten
from tests.support import plain


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in flatten(model)]


def shapes(graph: LayerGraph) -> list[list[tuple[int, ...]]]:
    return [[spec.shape for spec in layer.outputs] for layer in graph.layers]


def test_nested_chains_are_opened_under_the_paths_of_the_model():
    relu = nn.ReLU()
    model = nn.Sequential(
        OrderedDict(stem=nn.Linear(2, 2), body=nn.Sequential(relu, nn.Sequential(relu)), tail=nn.Identity())
    )
    assert names(model) == ["stem", "body.0", "body.1.0", "tail"]
    assert all(model.get_submodule(name) is layer for name, layer in flatten(model))


def test_chains_that_do_more_than_run_their_children_stay_one_layer():
    class Residual(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            return input + super().forward(input)

    class Named(nn.Sequential):
        pass

    hooked = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    hooked.register_forward_hook(lambda module, inputs, output: output.neg())
    model = nn.Sequential(
        Residual(nn.Linear(2, 2), nn.ReLU()), Named(nn.Linear(2, 2), nn.ReLU()), hooked, nn.Sequential()
    )
    assert names(model) == ["0", "1.0", "1.1", "2", "3"]


def test_hooks_on_the_outermost_chain_are_warned_of():
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_forward_hook(lambda module, inputs, output: None)
    with pytest.warns(UserWarning, match="hooks on the outermost Sequential do not run"):
        flatten(model)


def test_a_graph_is_a_chain_whose_edges_carry_tensors():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    )
    graph = capture(model, torch.randn(5, 3, 8, 8))
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
    first, second = capture(model, torch.zeros(2, 7, dtype=torch.long)).layers
    assert (first.name, first.kind, first.description) == ("0", "Embedding", "Embedding(10, 4)")
    assert (first.parameter_bytes, first.gradient_bytes) == (10 * 4 * 8, 0)
    assert (second.parameter_bytes, second.gradient_bytes) == ((4 * 3 + 3) * 8, (4 * 3 + 3) * 8)
    assert first.outputs == (TensorSpec(shape=(2, 7, 4), dtype="float64"),)
    assert second.output_bytes == 2 * 7 * 3 * 8


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float16, 2), (torch.bfloat16, 2), (torch.float64, 8), (torch.complex64, 8)]
)
def test_sizes_follow_the_dtype(dtype, size):
    spec = TensorSpec.of(torch.zeros(3, 5, dtype=dtype))
    assert (spec.bytes, spec.text) == (15 * size, f"{str(dtype).removeprefix('torch.')}[3, 5]")


def test_layers_may_pass_nests():
    class Fork(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"pair": (x, x > 0), "none": None, "number": 3, "sum": x.sum()}

    class Join(nn.Module):
        def forward(self, nest: dict[str, Any]) -> Tensor:
            return nest["pair"][0] * nest["pair"][1] + nest["sum"] * nest["number"]

    graph = capture(nn.Sequential(Fork(), Join()), torch.randn(4, 6))
    assert [spec.text for spec in graph.layers[0].outputs] == ["float32[4, 6]", "bool[4, 6]", "float32[]"]
    assert graph.edges["0", "1"]["bytes"] == 96 + 24 + 4
    assert shapes(graph)[1] == [(4, 6)]


def test_layers_that_share_state_are_known():
    linear, norm = nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)
    tied = nn.Linear(4, 4, bias=False)
    tied.weight = linear.weight
    layers = capture(nn.Sequential(linear, norm, linear, tied, norm, nn.ReLU()), torch.randn(3, 4)).layers
    assert [layer.shares_with for layer in layers] == [(), (), ("0",), ("0",), ("1",), ()]
    assert sum(layer.parameter_bytes for layer in layers) == 20 * 4
    weight = SharedTensor(layer="0", name="weight", bytes=64, gradient_bytes=64)
    assert layers[2].shared == (weight, SharedTensor(layer="0", name="bias", bytes=16, gradient_bytes=16))
    assert layers[3].shared == (weight,)
    assert [tensor.name for tensor in layers[4].shared] == [
        "running_mean",
        "running_var",
        "num_batches_tracked",
    ]
    assert all(tensor.gradient_bytes == 0 for tensor in layers[4].shared)


def test_buffers_are_counted_once():
    mask = nn.Module()
    mask.forward = lambda x: x  # type: ignore[method-assign]
    mask.register_buffer("mask", torch.zeros(8, 8))
    layers = capture(nn.Sequential(nn.BatchNorm1d(4), mask, mask), torch.randn(3, 4)).layers
    assert [layer.buffer_bytes for layer in layers] == [2 * 16 + 8, 256, 0]


def test_layers_whose_control_flow_reads_values():
    class Depends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if float(x.sum()) > 1e9:
                return x
            return torch.cat([x, x], dim=1)

    graph = capture(nn.Sequential(nn.Linear(4, 4), Depends(), nn.Linear(8, 2)), torch.randn(3, 4))
    assert shapes(graph) == [[(3, 4)], [(3, 8)], [(3, 2)]]


@pytest.mark.parametrize(
    "layer",
    [nn.LSTM(4, 5, batch_first=True), nn.GRU(4, 5, bidirectional=True), nn.TransformerEncoderLayer(4, 2)],
    ids=["lstm", "gru", "transformer"],
)
def test_shapes_are_those_of_a_real_call(layer):
    x = torch.randn(3, 6, 4)
    real = layer(x)
    expected = [tuple(part.shape) for part in pytree.tree_leaves(real)]
    assert shapes(capture(nn.Sequential(layer), x)) == [expected]


def test_an_error_of_a_layer_arrives_with_its_name():
    model = nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied") as caught:
        capture(model, torch.randn(3, 4))
    assert "layer '1.1' (Linear)" in "".join(caught.value.__notes__)


def test_nothing_of_the_model_changes():
    """A chain with statistics, random numbers and buffers, in training mode."""
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.BatchNorm1d(4),
        nn.Dropout(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        nn.LSTM(4, 4, batch_first=True),
    )
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    identities = [id(tensor) for tensor in (*model.parameters(), *model.buffers())]
    sample = torch.randn(3, 4)
    random = torch.get_rng_state()
    capture(model, sample)
    assert torch.get_rng_state().equal(random)
    plain.assert_same(model.state_dict(), state)
    assert [id(tensor) for tensor in (*model.parameters(), *model.buffers())] == identities
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_graph_describes_and_does_not_hold_the_model():
    graph = capture(nn.Sequential(nn.Linear(4, 2)), torch.randn(3, 4))
    assert not any(
        isinstance(value, nn.Module | Tensor) for _, node in graph.nodes(data=True) for value in node.values()
    )
    assert nx.is_directed_acyclic_graph(graph)
    assert list(graph.subgraph(["0"]).nodes) == ["0"]


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
