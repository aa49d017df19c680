"""The layers of a chain: their names in the model, bytes and shared tensors; their graph; the text of a recording."""

from collections import OrderedDict
from typing import Any

import networkx as nx
import torch
from torch import Tensor, nn

import pipepart
from pipepart.capture import LayerGraph, SharedTensor, TensorSpec, chain_of, describe, flatten


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
