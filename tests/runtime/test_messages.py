"""Messages between stages and ranks: sparse tensors, and what a message is sent as."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipepart import Cluster, Pipeline
from pipepart.autograd.sparse import record_stream
from pipepart.runtime.transport.wire import pack, whole_buffer
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


def test_a_message_is_sent_as_its_one_tensor_only_if_its_form_is_the_known_one() -> None:
    one = torch.randn(4, 6)
    tensors = [
        *(one, one.double(), one.t(), one[:2], torch.randn(6, 4), one.clone().requires_grad_()),
        *(torch.zeros(4, 6, dtype=torch.int32), torch.randn(4, 12)[:, ::2]),
    ]
    messages: list[Any] = [*tensors, *([tensor] for tensor in tensors), [one, one], [None], [], (one,)]
    for message, known in product(messages, messages):
        (form, buffers), (known_form, _) = pack(message), pack(known)
        found = whole_buffer(message, known_form, torch.device("cpu"))
        assert (found is not None) == (form == known_form and form.whole)
        if found is not None:
            assert found.data_ptr() == buffers[0].data_ptr()
            assert found.nbytes == buffers[0].nbytes
