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
from tests.support import plain
from tests.support.chains import cut_by_hand, on_device, plan_by_hand
from tests.support.pieces import WIDTH, Noise, linear
from tests.support.two_parts import Calls

LOSS = nn.MSELoss()
X, Y = torch.randn(2, 6, WIDTH).double()


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

    def operations(self) -> list[int]:
        """Return the number of operations of each graph, sorted."""
        return sorted(sum(node.op == "call_function" for node in each.graph.nodes) for each in self.graphs)


def cut(model: nn.Module, borders: list[int], backend: Any = "eager", **options: Any) -> Pipeline:
    return cut_by_hand(model, borders, loss_fn=LOSS, compile={"backend": backend}, **options)


def check_steps(pipe: Pipeline, drawing: bool = False) -> None:
    """Three steps as of the plain model: one of single layers, one that compiles, one of what is compiled."""
    for step in range(3):
        plain.check_step(pipe, X + step, Y, LOSS, seed=step if drawing else None)


def test_consecutive_layers_are_one_graph():
    """And the model keeps its layers and names."""
    backend = Counting()
    layers = [linear(), nn.Tanh(), linear(), nn.Tanh(), linear()]
    model = plain.in_double(layers)
    names = list(model.state_dict())
    with cut(model, [3], backend) as pipe:
        pipe.step(X, target=Y)
        assert backend.graphs == []
        pipe.step(X, target=Y)
        pipe.step(X, target=Y)
        assert list(pipe.state_dict()) == names
    assert all(now is before for now, before in zip(model, layers, strict=True))
    assert type(model[0].forward).__name__ == "method"
    assert backend.operations() == [2, 3]


def test_layers_that_draw_stay_single_and_draw_the_same():
    backend = Counting()
    model = plain.in_double([linear(), nn.Dropout(0.5), linear(), nn.Tanh(), Noise(), linear()])
    with cut(model, [3], backend) as pipe:
        check_steps(pipe, drawing=True)
    assert len(backend.graphs) == 4  # 0; 2; 3; 5


def test_a_dropout_of_nothing_is_compiled_until_it_drops():
    backend, drop = Counting(), nn.Dropout(0.0)
    with cut(plain.in_double([linear(), drop, linear()]), [], backend) as pipe:
        check_steps(pipe)
        assert len(backend.graphs) == 1
        drop.p = 0.5
        check_steps(pipe, drawing=True)


def test_a_layer_with_a_hook_runs_by_itself_whenever_the_hook_came():
    """The layers before and behind it are compiled anew, each by itself: torch would compile the hook with them."""
    seen: list[int] = []
    backend = Counting()
    model = plain.in_double([linear(), nn.Tanh(), linear()])
    with cut(model, [], backend) as pipe:
        for _ in range(2):
            pipe.step(X, target=Y)
        handle = model[1].register_forward_hook(lambda *_: seen.append(1))
        pipe.step(X, target=Y)
        assert len(seen) == 3
        assert backend.operations() == [1, 1, 3]
        handle.remove()
        pipe.step(X, target=Y)
        assert len(seen) == 3


def test_losses_are_added_at_every_step():
    """Only the layers beside one that adds a loss are compiled."""

    def add(x: Tensor) -> Tensor:
        pipepart.add_loss(x.square().mean())
        return x

    backend = Counting()
    model = plain.in_double([linear(), linear(), Calls(add), linear()])
    other = plain.twin(model)
    with cut(model, [2], backend) as pipe, cut_by_hand(other, [2], loss_fn=LOSS) as plainly:
        for _ in range(3):
            assert pipe.step(X, target=Y) == plainly.step(X, target=Y)
    assert backend.operations() == [1, 2]
    plain.assert_same(plain.gradients(model), plain.gradients(other))


def test_an_exception_in_compiled_layers_has_its_type_and_names_them():
    class Armed(nn.Module):
        armed = False

        def forward(self, x: Tensor) -> Tensor:
            if self.armed:
                raise KeyError("boom")
            return x * 2

    layer = Armed()
    with cut(plain.in_double([linear(), linear(), layer]), [1]) as pipe:
        for _ in range(2):
            pipe.step(X, target=Y)
        layer.armed = True
        with pytest.raises(KeyError, match="boom") as raised:
            pipe.step(X, target=Y)
    notes = raised.value.__notes__
    assert notes[0] == "pipepart: in the forward of layer '1' (Linear) or layer '2' (Armed)"
    assert notes[1].startswith("pipepart: on stage 1 of 2 on virtual:1, micro-batch 0 of 3")


@pytest.mark.parametrize(
    ("wish", "device", "error", "says"),
    [
        ("inductor", "cpu", TypeError, "got 'inductor'"),
        ({"model": nn.Tanh()}, "cpu", TypeError, "multiple values"),
        ({"backend": "nowhere"}, "cpu", RuntimeError, "nowhere"),
        ({"mode": "reduce-overhead"}, "cuda:0", ValueError, "max-autotune-no-cudagraphs"),
        ({"options": {"triton.cudagraphs": True}}, "cuda:0", ValueError, "max-autotune-no-cudagraphs"),
    ],
)
def test_wishes_that_torch_or_the_devices_do_not_know_are_refused_before_anything_is_made(
    wish, device, error, says
):
    plan = on_device(plan_by_hand(["0", "1"], [1], micro_batches=2), device)
    with pytest.raises(error, match=says):
        Pipeline(nn.Sequential(linear(), linear()), plan, compile=wish)
