"""Messages in fewer bytes, and how far off they are; sparse tensors in messages, buffers and gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipepart import Cluster, Pipeline
from pipepart.autograd.sparse import record_stream
from pipepart.runtime.transport.compress import CompressingTransport, decode, encode
from schedules import Kind, build
from tests.pipeline.conformance.layers import graph
from tests.pipeline.conformance.scenarios import sparse_messages, vectors
from tests.support import plain
from tests.support.chains import cut_by_hand, plan_by_hand
from tests.support.in_backward import with_gradient
from tests.support.plain import micro_batched_step
from tests.support.two_parts import Calls

LAYOUTS = {
    "rows": torch.randn(3, 700),
    "channels last": torch.randn(2, 5, 7, 3).to(memory_format=torch.channels_last),
    "turned": torch.randn(40, 30).t(),
    "expanded": torch.randn(20, 1).expand(20, 30),
    "a part": torch.randn(30, 30)[3:20, 5:7],
    "a number": torch.randn(()),
    "none": torch.randn(0, 4),
    "double": torch.randn(500, dtype=torch.double) * 1e300,
    "half": torch.randn(500).half() * 1000,
    "tiny": torch.tensor([3e-43, -1e-45, 0.0, 2e-44]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_int8_is_within_half_a_step_and_bf16_rounds_to_nearest_in_the_same_layout(name):
    tensor = LAYOUTS[name]
    found, rounded = (decode(encode(tensor, to)) for to in ("int8", "bf16"))
    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    largest = tensor.abs().max() if tensor.numel() else torch.zeros(())
    step = torch.finfo(tensor.dtype).eps * largest if tensor.dtype is torch.half else 1e-44
    assert ((found - tensor).double().abs() <= largest.double() / 254 * (1 + 1e-6) + step).all()
    assert torch.equal(rounded, tensor.bfloat16().to(tensor.dtype))
    if name in ("channels last", "turned"):
        assert found.stride() == rounded.stride() == tensor.stride()


def test_an_outlier_costs_precision_in_its_block_alone():
    tensor = torch.linspace(-1, 1, 1024)
    tensor[300] = 1e6
    off = (decode(encode(tensor, "int8")) - tensor).abs().view(4, 256).amax(1)
    assert off[1] > 0.1
    assert (off[[0, 2, 3]] <= 1 / 254).all()


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_stays_so(bad):
    tensor = torch.ones(600)
    tensor[300] = bad
    found = decode(encode(tensor, "int8"))
    assert found[256:512].isnan().all()
    assert torch.equal(found[:256], tensor[:256])


def test_only_activations_that_train_are_compressed():
    x = torch.randn(300, requires_grad=True)
    shared = torch.randn(600, requires_grad=True)
    message = {
        "trained": x,
        "mask": torch.full((300,), -torch.inf),
        "tokens": torch.arange(300),
        "half": torch.randn(9).half().requires_grad_(),
        "views": (shared[:300], shared[300:]),
        "text": "as it is",
    }
    box: list[Any] = []
    inner: Any = SimpleNamespace(send=lambda *given: box.append(given[-1]), recv=lambda *_: box[0])
    way = CompressingTransport(inner, build("gpipe", 2, 99), {(0, 1): "bf16"}, [torch.device("cpu")] * 2)
    way.send(0, 1, (Kind.F, 1, 0), message)
    (sent,) = box
    assert sent["trained"].values.dtype is torch.bfloat16
    assert all(sent[name] is message[name] for name in ("mask", "tokens", "half", "text"))
    assert sent["views"][0] is message["views"][0]
    found = way.recv(1, (Kind.F, 1, 0))
    assert found["trained"].is_leaf
    assert found["trained"].requires_grad
    assert torch.equal(found["trained"], x.bfloat16().float())


def border(to: Any) -> Calls:
    """What the border of two stages does: rounds activations and gradients."""

    def rounded(x: Tensor) -> Tensor:
        return decode(encode(x, to))

    return Calls(lambda x: with_gradient(x, rounded, rounded))


def gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def layers() -> list[nn.Module]:
    torch.manual_seed(2)
    return [nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 3)]


@pytest.mark.parametrize("schedule", ["sequential", "1f1b", "zb-h1"])
@pytest.mark.parametrize("to", ["bf16", "int8"])
def test_a_step_is_that_of_a_model_which_rounds_at_the_border(to, schedule):
    x, y = torch.randn(12, 5), torch.randn(12, 3)
    first, tanh, last = layers()
    model = nn.Sequential(first, tanh, border(to), last)
    with cut_by_hand(
        nn.Sequential(*layers()), [2], loss_fn=nn.MSELoss(), micro_batches=4, schedule=schedule, compress=to
    ) as pipe:
        for _ in range(2):
            model.zero_grad()
            pipe.zero_grad()
            micro_batched_step(model, x, y, nn.MSELoss(), 4)
            pipe.step(x, target=y)
            pairs = zip(model.parameters(), pipe.parameters(), strict=True)
            assert all(gradient(one).equal(gradient(other)) for one, other in pairs)
        plain = nn.MSELoss()(nn.Sequential(first, tanh, last)(x), y)
        assert torch.allclose(pipe.evaluate(x, target=y), plain)
        with torch.no_grad():
            assert torch.allclose(pipe(x), nn.Sequential(first, tanh, last)(x))


@pytest.mark.parametrize(("to", "size"), [("bf16", 4 * 64 * 2), ("int8", 4 * 64 + 4)])
def test_a_trace_has_the_bytes_that_are_sent(to, size):
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(12, 64)
    with cut_by_hand(model, [1, 2], loss_fn=nn.MSELoss(), compress=to) as pipe, pipe.trace() as trace:
        pipe.step(x, target=x)
    assert {int(one.bytes) for one in trace.steps[0].transfers} == {size}


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
