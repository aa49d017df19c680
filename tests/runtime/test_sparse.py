"""Sparse tensors in buffers, messages and gradients: steps have the numbers of the plain model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipepart import Cluster, Pipeline, Whole
from pipepart.autograd.sparse import record_stream
from tests.support import plain
from tests.support.chains import plan_by_hand

EDGES = torch.tensor([[0, 1, 2, 3, 3], [1, 2, 0, 3, 0]])


def adjacency() -> Tensor:
    numbers = torch.linspace(1, 2, 5)
    return torch.sparse_coo_tensor(EDGES, numbers, (4, 4), check_invariants=True).coalesce()


class Convolution(nn.Module):
    """Over a graph that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("graph", adjacency())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.get_buffer("graph"), self.inner(x).t()).t().tanh()


class Passing(nn.Module):
    """Over a graph that it passes on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        x = torch.sparse.mm(given["graph"], self.inner(given["x"]).t()).t()
        return {"x": x.tanh(), "graph": given["graph"]}


class Last(nn.Module):
    def forward(self, given: dict[str, Tensor]) -> Tensor:
        return given["x"]


def holding() -> tuple[nn.Sequential, Any]:
    return nn.Sequential(*[Convolution() for _ in range(4)]), torch.randn(6, 4)


def passing() -> tuple[nn.Sequential, Any]:
    layers = [Passing(), Passing(), Passing(), Last()]
    return nn.Sequential(*layers), {"x": torch.randn(6, 4), "graph": Whole(adjacency())}


WAYS: dict[str, dict[str, Any]] = {
    "traced": {"trace": True},
    "strict": {"strict": True},
    "twice": {"recompute": "always"},
    "twice and strict": {"recompute": "always", "strict": True},
    "in two parts": {"schedule": "zb-h1"},
    "over a slow link": {"slow": True},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [holding, passing])
def test_a_graph_that_layers_hold_or_pass_on(make: Callable[[], tuple[nn.Sequential, Any]], way: str):
    options = dict(WAYS[way])
    planned = {key: options.pop(key) for key in ("recompute", "schedule") if key in options}
    plan = plan_by_hand(["0", "1", "2", "3"], [2], micro_batches=3, **planned)
    if options.pop("slow", False):
        plan = plan.model_copy(update={"cluster": Cluster.virtual(2, threads=1, link="1GB/s")})
    model, x = make()
    y = torch.randn(6, 4)
    reference = plain.twin(model)
    with Pipeline(model, plan, nn.MSELoss(), **options) as pipe:
        pipe.step(x, target=y)
    rows = (x["x"] if isinstance(x, dict) else x).split(2)
    for own, wanted in zip(rows, y.split(2), strict=True):
        given = {"x": own, "graph": adjacency()} if isinstance(x, dict) else own
        (nn.functional.mse_loss(reference(given), wanted) / 3).backward()
    ours, theirs = plain.gradients(model), plain.gradients(reference)
    plain.assert_close(ours, theirs, 1e-6)


@pytest.mark.parametrize("options", [{"trace": True}, {"strict": True}])
def test_the_gradient_of_an_embedding_that_copies_of_the_model_add_up(options: dict[str, Any]):
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4))
    reference = plain.twin(model)
    x, y = torch.randint(9, (8,)), torch.randn(8, 4)
    with Pipeline(
        model, plan_by_hand(["0", "1"], [1], replicas=2, micro_batches=4), nn.MSELoss(), **options
    ) as pipe:
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
    ours, theirs = model[0].get_parameter("weight").grad, reference.get_parameter("0.weight").grad
    assert ours is not None
    assert theirs is not None
    assert ours.is_sparse
    torch.testing.assert_close(ours.to_dense(), theirs.to_dense())


def test_streams_hold_the_dense_parts_of_a_sparse_message(monkeypatch: pytest.MonkeyPatch):
    """``record_stream`` has no kernel for sparse tensors."""
    held: list[Tensor] = []
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: held.append(tensor))
    record_stream(adjacency(), torch.Stream("cpu"))
    assert [part.layout for part in held] == [torch.strided] * 2
    assert held[0].equal(adjacency().indices())
    assert held[1].equal(adjacency().values())
