"""compile=: which layers are compiled together, and what must not be compiled is not.

torch's "eager" and "aot_eager" backends compute with the kernels of the plain model, so numbers are compared bit by
bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import pipepart
from pipepart import Pipeline
from tests.support.chains import cut_by_hand, on_device, plan_by_hand
from tests.support.pieces import WIDTH, Noise, linear
from tests.support.plain import (
    assert_close,
    assert_same,
    copied,
    gradients,
    in_double,
    micro_batched_step,
    twin,
)

EAGER = {"backend": "eager"}
loss_fn = nn.MSELoss()


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch.compiler.reset()


class Counting:
    """A backend that keeps the graphs it is given."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        self.graphs.append(graph)
        return graph.forward


def mini_batch(samples: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, WIDTH).double(), torch.randn(samples, WIDTH).double()


def assert_trains_alike(pipe: Pipeline, plain: nn.Module, parts: int = 3, **how: Any) -> None:
    """Three steps: one of single layers, one that compiles, one of what is compiled."""
    model = pipe.module
    for step in range(3):
        x, y = mini_batch()
        torch.manual_seed(step)
        loss = pipe.step(copied(x), target=y)
        torch.manual_seed(step)
        expected = micro_batched_step(plain, copied(x), y, loss_fn, parts, **how)
        assert float((loss - expected).abs()) < 1e-14
        assert_same(gradients(model), gradients(plain))
        assert_same(dict(model.named_buffers()), dict(plain.named_buffers()))


def test_consecutive_layers_are_one_graph():
    """And the model keeps its layers and names."""
    backend = Counting()
    layers = [linear(), nn.Tanh(), linear(), nn.Tanh(), linear()]
    model = in_double(layers)
    names = list(model.state_dict())
    x, y = mini_batch()
    with cut_by_hand(model, [3], loss_fn=loss_fn, compile={"backend": backend}) as pipe:
        pipe.step(x, target=y)
        assert backend.graphs == []
        pipe.step(x, target=y)
        pipe.step(x, target=y)
        assert list(pipe.state_dict()) == names
    assert all(now is before for now, before in zip(model, layers, strict=True))
    assert type(model[0].forward).__name__ == "method"
    calls = [sum(node.op == "call_function" for node in graph.graph.nodes) for graph in backend.graphs]
    assert sorted(calls) == [2, 3]


def test_layers_that_draw_stay_single_and_draw_the_same():
    backend = Counting()
    model = in_double([linear(), nn.Dropout(0.5), linear(), nn.Tanh(), Noise(), linear()])
    plain = twin(model)
    with cut_by_hand(model, [3], loss_fn=loss_fn, compile={"backend": backend}) as pipe:
        assert_trains_alike(pipe, plain, drawing=True)
    assert len(backend.graphs) == 4  # 0; 2; 3; 5


def test_a_dropout_of_nothing_is_compiled_until_it_drops():
    backend = Counting()
    drop, plain_drop = nn.Dropout(0.0), nn.Dropout(0.0)
    model = in_double([linear(), drop, linear()])
    plain = nn.Sequential(twin(model[0]), plain_drop, twin(model[2]))
    with cut_by_hand(model, [], loss_fn=loss_fn, compile={"backend": backend}) as pipe:
        assert_trains_alike(pipe, plain)
        assert len(backend.graphs) == 1
        drop.p = plain_drop.p = 0.5
        assert_trains_alike(pipe, plain, drawing=True)


def test_a_layer_with_a_hook_runs_by_itself_whenever_the_hook_came():
    seen: list[int] = []
    model = in_double([linear(), nn.Tanh(), linear()])
    x, y = mini_batch()
    with cut_by_hand(model, [], loss_fn=loss_fn, micro_batches=3, compile=EAGER) as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
        handle = model[1].register_forward_hook(lambda *_: seen.append(1))
        pipe.step(x, target=y)
        assert len(seen) == 3
        handle.remove()
        pipe.step(x, target=y)
        assert len(seen) == 3


def test_statistics_are_gathered_and_losses_added_at_every_step():
    """Deferred statistics of a BatchNorm, and a loss that a layer adds."""

    class Adds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            pipepart.add_loss(x.square().mean())
            return x

    model = in_double([linear(), nn.BatchNorm1d(WIDTH), linear(), Adds(), linear()])
    plain = twin(model)
    x, y = mini_batch()
    options: dict[str, Any] = {"loss_fn": loss_fn, "deferred_batch_norm": True}
    with (
        cut_by_hand(model, [2], compile=EAGER, **options) as pipe,
        cut_by_hand(plain, [2], **options) as other,
    ):
        for _ in range(3):
            assert pipe.step(x, target=y) == other.step(x, target=y)
    assert_same(gradients(model), gradients(plain))
    assert_same(dict(model.named_buffers()), dict(plain.named_buffers()))


def test_forwards_in_evaluation_and_ones_that_are_differentiated():
    model = in_double([linear(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), linear()])
    plain = twin(model).eval()
    x, y = mini_batch()
    with cut_by_hand(model, [2], micro_batches=3, compile=EAGER) as pipe:
        pipe.eval()
        for _ in range(3):
            with torch.no_grad():
                assert torch.equal(pipe(x), torch.cat([plain(part) for part in x.tensor_split(3)]))
        for _ in range(3):
            loss_fn(pipe(x), y).backward()
            loss_fn(torch.cat([plain(part) for part in x.tensor_split(3)]), y).backward()
            assert_close(gradients(model), gradients(plain))


def test_an_exception_in_compiled_layers_has_its_type_and_names_them():
    class Armed(nn.Module):
        armed = False

        def forward(self, x: Tensor) -> Tensor:
            if self.armed:
                raise KeyError("boom")
            return x * 2

    layer = Armed()
    model = in_double([linear(), linear(), layer])
    x, y = mini_batch()
    with cut_by_hand(model, [1], loss_fn=loss_fn, compile=EAGER) as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
        layer.armed = True
        with pytest.raises(KeyError, match="boom") as raised:
            pipe.step(x, target=y)
        layer.armed = False
        pipe.step(x, target=y)
    notes = raised.value.__notes__
    assert notes[0] == "pipepart: in the forward of layer '1' (Linear) or layer '2' (Armed)"
    assert notes[1].startswith("pipepart: on stage 1 of 2 on virtual:1, micro-batch 0 of 3")


@pytest.mark.parametrize(
    ("wish", "error", "says"),
    [
        ("inductor", TypeError, "got 'inductor'"),
        ({"speed": 11}, TypeError, "speed"),
        ({"model": nn.Tanh()}, TypeError, "leave it out"),
        ({"backend": "nowhere"}, RuntimeError, "nowhere"),
        ({"mode": "fastest"}, RuntimeError, "fastest"),
    ],
)
def test_wishes_that_torch_does_not_know_are_refused_before_anything_is_made(wish, error, says):
    with pytest.raises(error, match=says):
        cut_by_hand(nn.Sequential(linear(), linear()), [1], compile=wish)


@pytest.mark.parametrize(
    "wish", [{"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}], ids=str
)
def test_graphs_of_torch_itself_are_refused_on_cuda_devices(wish):
    plan = plan_by_hand(["0", "1"], [1], micro_batches=2)
    with pytest.raises(ValueError, match="max-autotune-no-cudagraphs"):
        Pipeline(nn.Sequential(linear(), linear()), on_device(plan, "cuda:0"), compile=wish)
