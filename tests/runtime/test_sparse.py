"""Sparse tensors in buffers, messages and gradients: steps have the numbers of the plain model."""

import pytest
import torch
from torch import Tensor, nn

from pipepart import Cluster, Pipeline
from pipepart.autograd.sparse import record_stream
from tests.pipeline.conformance.layers import graph
from tests.pipeline.conformance.scenarios import sparse_messages, vectors
from tests.support import plain
from tests.support.chains import plan_by_hand


def test_a_sparse_message_over_a_slow_link():
    model = sparse_messages()
    names = [name for name, _ in model.named_children()]
    plan = plan_by_hand(names, [3], micro_batches=3)
    plan = plan.model_copy(update={"cluster": Cluster.virtual(2, threads=1, link="1GB/s")})
    with Pipeline(model, plan, nn.MSELoss()) as pipe:
        plain.check_step(pipe, *vectors(6), nn.MSELoss())


def test_the_gradient_of_an_embedding_that_copies_of_the_model_add_up_stays_sparse():
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4))
    plan = plan_by_hand(["0", "1"], [1], replicas=2, micro_batches=4)
    with Pipeline(model, plan, nn.MSELoss()) as pipe:
        pipe.step(torch.randint(9, (8,)), target=torch.randn(8, 4))
    gradient = model[0].weight.grad
    assert isinstance(gradient, Tensor)
    assert gradient.is_sparse


def test_streams_hold_the_dense_parts_of_a_sparse_message(monkeypatch: pytest.MonkeyPatch):
    """``record_stream`` has no kernel for sparse tensors."""
    held: list[Tensor] = []
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: held.append(tensor))
    record_stream(graph(), torch.Stream("cpu"))
    assert [part.layout for part in held] == [torch.strided] * 2
    assert held[0].equal(graph().indices())
    assert held[1].equal(graph().values())
