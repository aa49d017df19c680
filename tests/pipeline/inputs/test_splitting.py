"""How a mini-batch becomes micro-batches: what is split, what goes whole, and the user's own way."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pipepart
from pipepart import Pipeline, Whole
from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.two_parts import Calls

pytestmark = pytest.mark.usefixtures("short_profiles")


class Attend(nn.Module):
    """Attention with a mask ``[positions, positions]`` that is the same for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, nest: dict[str, Any]) -> Tensor:
        x = nest["x"] * nest.get("scale", 1.0)
        return self.inner(x, x, x, attn_mask=nest["mask"], need_weights=False)[0]


MASK = torch.triu(torch.full((6, 6), -torch.inf), 1)  # as many positions as samples


def attention() -> nn.Sequential:
    return nn.Sequential(Attend(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()


@pytest.mark.parametrize("mask_trained", [False, True])
@pytest.mark.parametrize("drop_in", [False, True])
def test_what_is_marked_whole_goes_whole_to_every_micro_batch(mask_trained, drop_in):
    model = attention()
    reference = plain.twin(model)
    x, y = torch.randn(6, 6, 4).double(), torch.randn(6, 6, 2).double()
    mask = torch.randn(6, 6).double().requires_grad_(mask_trained)
    with cut_by_hand(model, [1, 2], loss_fn=nn.MSELoss(), micro_batches=4) as pipe:
        given = {"x": x, "mask": Whole(mask)}
        if drop_in:
            loss = nn.functional.mse_loss(pipe(given), y)
            loss.backward()
        else:
            loss = pipe.step(given, target=y)
    ours, mask.grad = mask.grad, None
    plain.assert_near(loss.detach(), plain.whole_step(reference, {"x": x, "mask": mask}, y, nn.MSELoss()))
    plain.assert_close(plain.gradients(model), plain.gradients(reference))
    plain.assert_close({"mask": ours}, {"mask": mask.grad})


def test_tensors_without_dimensions_and_other_values_go_whole():
    class Enter(nn.Module):
        def forward(self, nest: dict[str, Any]) -> Tensor:
            assert nest["names"] == ["a", "b"]
            assert nest["none"] is None
            return nest["x"] * nest["scale"] + nest["deep"][0]["shift"]

    model = nn.Sequential(Enter(), nn.Linear(4, 4), nn.Linear(4, 2)).double()
    reference = plain.twin(model)
    scale = torch.tensor(2.0, dtype=torch.double, requires_grad=True)
    nest = {
        "x": torch.randn(7, 4).double(),
        "scale": scale,
        "names": ["a", "b"],
        "none": None,
        "deep": [{"shift": torch.randn(7, 1).double()}, 3],
    }
    y = (torch.randn(7, 2).double(), torch.tensor(0.5).double())

    def loss_fn(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        return ((output - target[0]) ** 2 * target[1]).mean()

    with cut_by_hand(model, [1, 2], loss_fn=loss_fn) as pipe:
        loss = pipe.step(nest, target=y)
    ours, scale.grad = scale.grad, None
    plain.assert_near(loss, plain.whole_step(reference, nest, y, loss_fn))
    plain.assert_close(plain.gradients(model), plain.gradients(reference))
    plain.assert_close({"scale": ours}, {"scale": scale.grad})


def test_weights_of_classes_marked_whole_in_a_target():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 6)).double()
    reference = plain.twin(model)
    x, y, weights = torch.randn(6, 4).double(), torch.randint(6, (6,)), torch.rand(6).double()

    def summed(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(output, target["y"], target["weights"], reduction="sum")

    with cut_by_hand(model, [1], loss_fn=summed, reduction="sum") as pipe:
        loss = pipe.step(x, target={"y": y, "weights": Whole(weights)})
    plain.assert_near(loss, plain.whole_step(reference, x, {"y": y, "weights": weights}, summed))
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_a_tensor_of_another_extent_is_refused_with_what_to_write():
    with (
        cut_by_hand(attention(), [1], loss_fn=nn.MSELoss()) as pipe,
        pytest.raises(ValueError, match=r"6 samples where the input has 5.*pipepart\.Whole\(tensor\)"),
    ):
        pipe.step(
            {"x": torch.randn(5, 6, 4).double(), "mask": MASK.double()}, target=torch.zeros(5, 6, 2).double()
        )


def classes_second() -> nn.Module:
    """Scores ``[samples, classes, positions]``, as cross entropy takes them."""
    return Calls(lambda x: x.transpose(1, 2))


def tagger() -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), classes_second()
    ).double()


LENGTHS = torch.tensor([3, 9, 4, 8, 2, 7, 6])


def padded() -> tuple[Tensor, Tensor]:
    """Seven sentences of unlike length, padded with zeros; the tags of padding are ignored."""
    inside = torch.arange(9) < LENGTHS[:, None]
    return torch.randint(1, 9, (7, 9)) * inside, torch.randint(5, (7, 9)).where(inside, -100)


def by_length(pair: tuple[Any, Any], parts: int) -> list[tuple[Any, Any]]:
    """Sentences of like length together, each part as short as it can be."""
    words, tags = pair
    order = LENGTHS.argsort()
    return [
        (words[rows, : LENGTHS[rows].max()], None if tags is None else tags[rows, : LENGTHS[rows].max()])
        for rows in order.tensor_split(parts)
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_micro_batches_bucketed_by_length_have_the_numbers_of_the_whole(schedule):
    model = tagger()
    reference = plain.twin(model)
    words, tags = padded()
    pipe = split_by(model, by_length, nn.CrossEntropyLoss(), schedule)
    loss = pipe.step(words, target=tags)
    pipe.close()
    plain.assert_near(loss, plain.whole_step(reference, words, tags, nn.CrossEntropyLoss()))
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_mean_over_the_words_of_each_part_is_one_over_the_words_of_all(schedule):

    def mean(output: Tensor, target: Tensor) -> Tensor:
        return (output.sum(1) - target).pow(2).mean()

    def counted(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return (output.sum(1) - target).pow(2).sum(), target.numel()

    words, tags = padded()
    for loss_fn in (mean, counted):
        model = tagger()
        reference = plain.twin(model)
        with split_by(model, by_length, loss_fn, schedule) as pipe:
            pipe.step(words, target=tags.double())
        parts = by_length((words, tags.double()), 3)
        total = sum(part.numel() for part, _ in parts)
        for part, target in parts:
            (counted(reference(part), target)[0] / total).backward()
        plain.assert_close(plain.gradients(model), plain.gradients(reference))


def split_by(model: nn.Sequential, split: Any, loss_fn: Any, schedule: str = "1f1b") -> Pipeline:
    made = cut_by_hand(model, [1, 3], loss_fn=loss_fn, schedule=schedule)
    made.close()
    return Pipeline(model, made.plan, loss_fn=loss_fn, split=split)


def test_gradients_go_back_through_the_users_split():
    """Samples in another order, multiplied by the lengths of strings on the way."""

    def split(pair: tuple[Any, Any], parts: int) -> list[Any]:
        (x, strings), y = pair
        factor = len(strings[0])
        return [
            (x[rows] * factor, None if y is None else y[rows])
            for rows in torch.arange(len(x)).flip(0).tensor_split(parts)
        ]

    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2)).double()
    reference = plain.twin(model)
    x, y = torch.randn(7, 3).double().requires_grad_(), torch.randn(7, 2).double()
    with split_by(model, split, nn.MSELoss()) as pipe:
        pipe.step((x, ["ab", "cd"]), target=y)
        output = pipe((x, ["ab", "cd"]))
        output.pow(3).sum().backward()
    ours, x.grad = x.grad, None
    plain.whole_step(reference, x * 2, y, nn.MSELoss())
    expected = reference(x * 2)
    expected.pow(3).sum().backward()
    plain.assert_near(output.detach(), expected.detach().flip(0))
    plain.assert_close({"x": ours}, {"x": x.grad})
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


WRONG_SPLITS: dict[str, tuple[Any, type[Exception], str]] = {
    "none": (lambda pair, parts: [], ValueError, "returned 0 parts .* 1 to 3"),
    "too many": (lambda pair, parts: [pair] * 4, ValueError, "returned 4 parts .* 1 to 3"),
    "no pairs": (lambda pair, parts: [pair[0]], TypeError, r"pairs \(input, target\), got a Tensor"),
    "unlike": (lambda pair, parts: [(pair[0], pair[1][:2])], ValueError, "2 samples where the input has 6"),
}


@pytest.mark.parametrize("case", WRONG_SPLITS)
def test_splits_that_are_none(case):
    split, kind, message = WRONG_SPLITS[case]
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with split_by(model, split, nn.MSELoss()) as pipe:
        with pytest.raises(kind, match=message):
            pipe.step(torch.randn(6, 4), target=torch.randn(6, 2))
        assert model.state_dict()["2.num_batches_tracked"] == 0


def test_one_line_takes_a_split():
    words, tags = padded()
    model = tagger()
    reference = plain.twin(model)
    with pipepart.Pipeline.auto(
        model, words, target=tags, loss_fn=nn.CrossEntropyLoss(), micro_batches=3, split=by_length
    ) as pipe:
        assert [costs.samples for costs in pipe.plan.profile.costs] == [3] if pipe.plan.profile else False
        pipe.step(words, target=tags)
    plain.whole_step(reference, words, tags, nn.CrossEntropyLoss())
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_one_line_takes_a_sample_with_a_part_that_is_whole():
    model = attention()
    x, y = {"x": torch.randn(6, 6, 4).double(), "mask": Whole(MASK.double())}, torch.randn(6, 6, 2).double()
    reference = plain.twin(model)
    with pipepart.Pipeline.auto(model, (x,), target=y, loss_fn=nn.MSELoss(), micro_batches=3) as pipe:
        pipe.step(x, target=y)
    plain.whole_step(reference, {"x": x["x"], "mask": MASK.double()}, y, nn.MSELoss())
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_other_lengths_and_sizes_from_step_to_step():
    """In training, evaluation and training again; 10 samples over 4, and fewer samples than micro-batches."""
    model = nn.Sequential(
        nn.Embedding(9, 4), nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 5), classes_second()
    ).double()
    reference = plain.twin(model)
    with cut_by_hand(model, [1, 3], loss_fn=nn.CrossEntropyLoss(), micro_batches=4) as pipe:
        for samples, length in ((10, 5), (10, 7), (3, 5), (1, 1), (9, 12)):
            x, y = torch.randint(9, (samples, length)), torch.randint(5, (samples, length))
            loss = pipe.step(x, target=y)
            plain.assert_near(loss, plain.whole_step(reference, x, y, nn.CrossEntropyLoss()))
            pipe.eval()
            with torch.no_grad():
                plain.assert_near(pipe(x), reference(x))
            pipe.train()
    plain.assert_close(plain.gradients(model), plain.gradients(reference))
