"""How a mini-batch becomes micro-batches: what is split, what goes whole, what is refused, and the user's own way."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree as pytree

from pipepart import Pipeline, Whole
from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.two_parts import Calls

pytestmark = pytest.mark.usefixtures("short_profiles")


@dataclass(frozen=True)
class Labels:
    y: Tensor
    name: str
    scale: Tensor
    weights: list[Any]


class Pair(NamedTuple):
    x: Tensor
    factor: Tensor


@dataclass
class Hidden:
    value: Tensor
    skip: Tensor


class Box:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def enter(given: dict[str, Any]) -> Hidden:
    assert (given["names"], given["none"], given["deep"][1]) == (["a", "b"], None, 3)
    x = given["pair"].x * given["pair"].factor
    mixed = x @ given["mask"] + x @ given["sparse"].to_dense() + given["box"].tensor
    return Hidden(mixed, x * given["scale"] + given["deep"][0]["shift"])


def network() -> nn.Sequential:
    leave = Calls(lambda hidden: hidden.value * 2 + hidden.skip)
    return plain.in_double([Calls(enter), leave, nn.Linear(6, 4), nn.Linear(4, 2)])


def summed(output: Tensor, target: Labels) -> Tensor:
    of_samples, of_classes = target.weights
    return ((output - target.y).pow(2) * target.scale * of_samples * of_classes).sum()


def in_double(nest: Any) -> Any:
    """Copy a nest; floating-point tensors in float64, and asking for gradients."""

    def copied(tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided and tensor.is_floating_point():
            return tensor.detach().double().requires_grad_()
        return tensor

    return pytree.tree_map_only(Tensor, copied, nest)


def bare(nest: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: leaf.value if isinstance(leaf, Whole) else leaf,
        nest,
        is_leaf=lambda leaf: isinstance(leaf, Whole),
    )


def leaf_gradients(nest: Any) -> dict[str, Tensor | None]:
    tensors = [leaf for leaf in pytree.tree_leaves(nest) if isinstance(leaf, Tensor)]
    return {str(place): tensor.grad for place, tensor in enumerate(tensors)}


@pytest.mark.parametrize("called", [False, True], ids=["step", "called"])
def test_numbers_and_gradients_are_those_of_the_whole_mini_batch(called: bool) -> None:
    """Of tensors that are split or go whole, and other values, in nests and between stages."""
    x = {
        "pair": Pair(torch.randn(6, 6), torch.randn(6, 1)),
        "mask": Whole(torch.randn(6, 6)),  # as many rows as samples
        "sparse": Whole(torch.eye(6).double().to_sparse()),
        "box": Whole(Box(torch.randn(6).double())),
        "scale": torch.tensor(2.0),
        "names": ["a", "b"],
        "none": None,
        "deep": [{"shift": torch.randn(6, 1)}, 3],
    }
    y, of_classes = torch.randn(6, 2), torch.rand(2)
    target = Labels(y, "labels", torch.tensor(0.5), [torch.rand(6, 1), Whole(of_classes)])
    unmarked = replace(target, weights=[target.weights[0], of_classes])
    model = network()
    reference = plain.twin(model)
    ours, theirs = in_double(x), in_double(x)
    with cut_by_hand(model, [1, 2], loss_fn=summed, micro_batches=4, reduction="sum") as pipe:
        if called:
            loss = summed(pipe(ours), unmarked)
            loss.backward()
        else:
            loss = pipe.step(ours, target=target)
    expected = summed(reference(bare(theirs)), unmarked)
    expected.backward()
    plain.assert_near(loss.detach(), expected.detach())
    plain.assert_close(plain.gradients(model), plain.gradients(reference))
    plain.assert_close(leaf_gradients(ours), leaf_gradients(theirs))


def test_gradients_go_back_through_the_users_split() -> None:
    """Samples in another order, multiplied by the lengths of strings on the way."""

    def split(pair: tuple[Any, Any], parts: int) -> list[Any]:
        (x, strings), y = pair
        rows = torch.arange(len(x)).flip(0).tensor_split(parts)
        return [((x[own] * len(strings[0]), strings), Whole(y[own])) for own in rows]

    enter = Calls(lambda pair: pair[0] * 2 / len(pair[1][0]))
    model = plain.in_double([enter, nn.Linear(3, 3), nn.Linear(3, 2)])
    reference, strings = plain.twin(model), ["ab", "cd"]
    ours, y = torch.randn(7, 3).double().requires_grad_(), torch.randn(7, 2).double()
    theirs = ours.detach().clone().requires_grad_()
    with cut_by_hand(model, [1, 2], loss_fn=functional.mse_loss, split=split) as pipe:
        pipe.step((ours, strings), target=y)
    functional.mse_loss(reference((theirs * 2, strings)), y).backward()
    plain.assert_close(plain.gradients(model), plain.gradients(reference))
    plain.assert_close({"x": ours.grad}, {"x": theirs.grad})


PACKED = pack_sequence([torch.ones(3), torch.ones(2), torch.ones(1), torch.ones(1)])
REFUSED: dict[str, tuple[Any, str]] = {
    "object in a nest": (
        {"x": torch.ones(4, 2), "box": [Box(torch.ones(4, 2))]},
        "Box, an object with tensors",
    ),
    "packed": ({"x": torch.ones(4, 2), "packed": PACKED}, "PackedSequence"),
    "sparse": (torch.eye(4).to_sparse(), r"sparse \(torch.sparse_coo\) tensor \[4, 4\]"),
    "list of values": ({"x": torch.ones(4, 2), "names": ["a", "b", "c", "d"]}, "list of 4 str"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_split_is_refused_before_anything_runs(case: str) -> None:
    value, message = REFUSED[case]
    ran: list[int] = []
    model = nn.Sequential(nn.Identity(), nn.Identity())
    model[0].register_forward_hook(lambda *_: ran.append(1))
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss()) as pipe:
        for wrong in ((value, torch.ones(4, 2)), (torch.ones(4, 2), value)):
            with pytest.raises(TypeError, match=message + r".*pipepart\.Whole"):
                pipe.step(wrong[0], target=wrong[1])
    assert not ran


def test_an_object_with_tensors_between_stages_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Calls(Box), Calls(lambda box: box.tensor))
    with (
        cut_by_hand(model, [2], loss_fn=nn.MSELoss()) as pipe,
        pytest.raises(TypeError, match="Box, an object with tensors"),
    ):
        pipe.step(torch.ones(4, 2), target=torch.ones(4, 2))


LENGTHS = torch.tensor([3, 9, 4, 8, 2, 7, 6])


def by_length(pair: tuple[Any, Any], parts: int) -> list[tuple[Any, Any]]:
    """Sentences of like length together, each part as short as it can be."""
    words, tags = pair
    return [
        (words[rows, : LENGTHS[rows].max()], tags[rows, : LENGTHS[rows].max()])
        for rows in LENGTHS.argsort().tensor_split(parts)
    ]


def test_micro_batches_bucketed_by_length_have_the_numbers_of_the_whole() -> None:
    """They are profiled, too. Sentences are padded with zeros, and the tags of padding are ignored."""
    inside = torch.arange(9) < LENGTHS[:, None]
    words, tags = torch.randint(1, 9, (7, 9)) * inside, torch.randint(5, (7, 9)).where(inside, -100)
    turned = Calls(lambda x: x.transpose(1, 2))  # [samples, classes, positions], as cross entropy takes them
    model = plain.in_double([nn.Embedding(9, 4, padding_idx=0), nn.Tanh(), nn.Linear(4, 5), turned])
    options: dict[str, Any] = {"loss_fn": nn.CrossEntropyLoss(), "micro_batches": 3, "split": by_length}
    with Pipeline.auto(model, words, target=tags, **options) as pipe:
        plain.check_whole(pipe, words, tags, nn.CrossEntropyLoss())


WRONG_SPLITS: dict[str, tuple[Any, type[Exception], str]] = {
    "none": (lambda pair, parts: [], ValueError, "returned 0 parts .* 1 to 3"),
    "no pairs": (lambda pair, parts: [pair[0]], TypeError, r"pairs \(input, target\), got a Tensor"),
    "unlike": (lambda pair, parts: [(pair[0], pair[1][:2])], ValueError, "2 samples where the input has 6"),
}


@pytest.mark.parametrize("case", WRONG_SPLITS)
def test_splits_that_are_none(case: str) -> None:
    split, kind, message = WRONG_SPLITS[case]
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with cut_by_hand(model, [1, 3], loss_fn=nn.MSELoss(), split=split) as pipe:
        with pytest.raises(kind, match=message):
            pipe.step(torch.randn(6, 4), target=torch.randn(6, 2))
        assert model.state_dict()["2.num_batches_tracked"] == 0
