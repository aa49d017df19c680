"""Containers: dataclasses and named tuples are taken apart, other objects that hold tensors are refused by name."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from pipepart import Whole
from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.two_parts import Calls


@dataclass(frozen=True)
class Labels:
    y: Tensor
    name: str
    weights: list[Tensor] = field(default_factory=list)


class Pair(NamedTuple):
    x: Tensor
    scale: Tensor


@dataclass
class Hidden:
    value: Tensor
    skip: Tensor


class Box:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def weighed(output: Tensor, target: Labels) -> Tensor:
    assert target.name == "labels"
    return ((output - target.y).pow(2) * target.weights[0]).sum()


def test_dataclasses_and_named_tuples_are_split_and_passed_from_stage_to_stage():
    enter = Calls(lambda pair: Hidden(pair.x * pair.scale, pair.x))
    leave = Calls(lambda hidden: hidden.value * 2 + hidden.skip)
    model = nn.Sequential(enter, leave, nn.Linear(3, 2)).double()
    reference = plain.twin(model)
    x, scale = torch.randn(7, 3).double().requires_grad_(), torch.randn(7, 1).double()
    target = Labels(torch.randn(7, 2).double(), "labels", [torch.rand(7, 1).double()])
    with cut_by_hand(model, [1, 2], loss_fn=weighed, reduction="sum") as pipe:
        loss = pipe.step(Pair(x, scale), target=target)
    ours, x.grad = x.grad, None
    plain.assert_near(loss, plain.whole_step(reference, Pair(x, scale), target, weighed))
    plain.assert_close({"x": ours}, {"x": x.grad})
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


PACKED = pack_sequence([torch.ones(3), torch.ones(2), torch.ones(1), torch.ones(1)])
REFUSED: dict[str, tuple[Any, str]] = {
    "object": (Box(torch.ones(4, 2)), "Box, an object with tensors"),
    "object in a nest": (
        {"x": torch.ones(4, 2), "box": [Box(torch.ones(4, 2))]},
        "Box, an object with tensors",
    ),
    "packed": ({"x": torch.ones(4, 2), "packed": PACKED}, "PackedSequence"),
    "sparse": (torch.eye(4).to_sparse(), r"sparse \(torch.sparse_coo\) tensor \[4, 4\]"),
    "sparse rows": (torch.eye(4).to_sparse_csr(), "sparse"),
    "list of values": ({"x": torch.ones(4, 2), "names": ["a", "b", "c", "d"]}, "list of 4 str"),
    "tuple of values": ({"x": torch.ones(4, 2), "names": ("a", "b", "c", "d")}, "tuple of 4 str"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_split_is_refused_before_anything_runs(case):
    value, message = REFUSED[case]
    ran = []
    model = nn.Sequential(nn.Identity(), nn.Identity())
    model[0].register_forward_hook(lambda *_: ran.append(1))
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss()) as pipe:
        with pytest.raises(TypeError, match=message + r".*pipepart\.Whole"):
            pipe.step(value, target=torch.ones(4, 2))
        with pytest.raises(TypeError, match=message + r".*pipepart\.Whole"):
            pipe.step(torch.ones(4, 2), target=value)
    assert not ran


def test_an_object_that_is_whole_goes_to_every_micro_batch():
    use = Calls(lambda nest: nest["x"] @ nest["sparse"].to_dense() + nest["box"].tensor)
    model = nn.Sequential(use, nn.Linear(3, 2)).double()
    reference = plain.twin(model)
    x, y = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    box, sparse = Box(torch.randn(3).double()), torch.eye(3).double().to_sparse()
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss()) as pipe:
        loss = pipe.step({"x": x, "box": Whole(box), "sparse": Whole(sparse)}, target=y)
    expected = plain.whole_step(reference, {"x": x, "box": box, "sparse": sparse}, y, nn.MSELoss())
    plain.assert_near(loss, expected)
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_an_object_with_tensors_between_stages_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), Calls(Box), Calls(lambda box: box.tensor))
    with (
        cut_by_hand(model, [2], loss_fn=nn.MSELoss()) as pipe,
        pytest.raises(TypeError, match="Box, an object with tensors"),
    ):
        pipe.step(torch.ones(4, 2), target=torch.ones(4, 2))
