"""Where other pipelines give wrong numbers in silence, crash or refuse, a step gives those of the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pipepart
from tests.support import plain
from tests.support.chains import cut_by_hand

SCHEDULES = ("gpipe", "1f1b", "zb-h1")
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)

VOCABULARY, WIDTH, HEADS = 17, 8, 2


def tokens(samples: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randint(VOCABULARY, (samples, length)), torch.randint(VOCABULARY, (samples, length))


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Rotary(nn.Module):
    """Attention with rotary positions as in Llama: tables in buffers that no checkpoint holds, shared key heads."""

    cos: Tensor
    sin: Tensor

    def __init__(self, longest: int = 16) -> None:
        super().__init__()
        half = WIDTH // HEADS // 2
        angles = torch.outer(torch.arange(longest), 100.0 ** (-torch.arange(half) / half)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.norm = nn.RMSNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key_value = nn.Linear(WIDTH, 2 * WIDTH // HEADS, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        normed = self.norm(x)
        query = self._turned(self.query(normed).view(samples, length, HEADS, -1).transpose(1, 2))
        key, value = self.key_value(normed).view(samples, length, 1, -1).transpose(1, 2).chunk(2, dim=-1)
        key, value = (part.expand(-1, HEADS, -1, -1) for part in (self._turned(key), value))
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(seen.transpose(1, 2).flatten(2))

    def _turned(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        length = x.shape[2]
        return x * self.cos[:length] + torch.cat([-second, first], dim=-1) * self.sin[:length]


class Perceptron(nn.Module):
    """The gated half of a Llama block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


def llama() -> nn.Sequential:
    """Six layers: an embedding, two blocks of two, and a head."""
    return plain.in_double(
        [
            nn.Embedding(VOCABULARY, WIDTH),
            Rotary(),
            Perceptron(),
            Rotary(),
            Perceptron(),
            nn.Linear(WIDTH, VOCABULARY, bias=False),
        ]
    )


class Enter(nn.Module):
    """Begins a skip connection: what came in travels along."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x).relu(), x


class Carry(Enter):
    """Works on the first of two and passes the other on."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, skipped = pair
        return self.inner(x).tanh(), skipped


class Leave(nn.Module):
    """Ends it."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1] * pair[1]


class Depends(nn.Module):
    """Takes one of two ways by what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if bool((100 * x.sum()).floor() % 2):
            return self.left(x)
        return self.right(x).sin() if x.shape[0] > 1 else self.right(x)


def steps_as_plainly(
    model: nn.Module,
    borders: list[int],
    batches: list[tuple[Any, Any]],
    loss_fn: Any,
    schedule: str,
    parts: int = 4,
) -> None:
    """Bit for bit the gradients of micro-batches one after the other, and those of the whole mini-batch to 1e-12."""
    reference, whole = plain.twin(model), plain.twin(model)
    with cut_by_hand(model, borders, loss_fn=loss_fn, micro_batches=parts, schedule=schedule) as pipe:
        for x, y in batches:
            for each in (model, reference, whole):
                each.zero_grad()
            loss = pipe.step(x, target=y)
            plain.micro_batched_step(reference, x, y, loss_fn, min(parts, len(y)))
            plain.assert_near(loss, plain.whole_step(whole, x, y, loss_fn), what="loss")
            plain.assert_same(plain.gradients(model), plain.gradients(reference))
            plain.assert_close(plain.gradients(model), plain.gradients(whole))


@each_schedule
def test_targets_that_are_ignored_unevenly_count_for_nothing(schedule: str) -> None:
    model, loss_fn = llama(), nn.CrossEntropyLoss(ignore_index=-1)
    whole = plain.twin(model)
    x, y = tokens(8, 6)
    for sample, ignored in enumerate([0, 5, 6, 6, 1, 0, 4, 2]):  # the second micro-batch has none that counts
        y[sample, :ignored] = -1

    def classes_second(output: Tensor, target: Tensor) -> Tensor:
        return loss_fn(output.transpose(1, 2), target)

    with cut_by_hand(model, [2, 4], loss_fn=classes_second, micro_batches=4, schedule=schedule) as pipe:
        loss = pipe.step(x, target=y)
    plain.assert_near(loss, plain.whole_step(whole, x, y, classes_second), what="loss")
    plain.assert_close(plain.gradients(model), plain.gradients(whole))


@each_schedule
def test_an_embedding_and_a_head_in_two_stages_share_one_weight_and_its_whole_gradient(schedule: str) -> None:
    model = llama()
    model[5].weight = model[0].weight
    reference = plain.twin(model)
    batches = [tokens(6, 5) for _ in range(3)]
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, reference))
    with cut_by_hand(model, [2, 4], loss_fn=token_loss, micro_batches=3, schedule=schedule) as pipe:
        for x, y in batches:
            pipe.step(x, target=y)
            plain.micro_batched_step(reference, x, y, token_loss, 3)
            plain.assert_same(plain.gradients(model), plain.gradients(reference))
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
    plain.assert_same(model.state_dict(), reference.state_dict())
    assert model[5].weight is model[0].weight


@each_schedule
def test_batch_norm_sees_each_micro_batch_once_and_nothing_else(schedule: str) -> None:
    """From the first line on: profiling, planning and building run no forward of the user's layers."""
    model = nn.Sequential(
        nn.Linear(6, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2)
    )
    reference = plain.twin(model)
    x, y = torch.randn(12, 6), torch.randn(12, 2)
    with pipepart.Pipeline.auto(
        model,
        x,
        target=y,
        loss_fn=nn.MSELoss(),
        devices=pipepart.Cluster.virtual(2, threads=1),
        schedule=schedule,
        micro_batches=4,
    ) as pipe:
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
    assert [model.get_buffer(f"{place}.num_batches_tracked").item() for place in (1, 3)] == [4, 4]
    plain.assert_same(dict(model.named_buffers()), dict(reference.named_buffers()))


@each_schedule
def test_clipping_takes_the_norm_of_all_stages(schedule: str) -> None:
    model = llama()
    reference = plain.twin(model)
    x, y = tokens(8, 5)
    with cut_by_hand(model, [1, 3, 5], loss_fn=token_loss, micro_batches=4, schedule=schedule) as pipe:
        pipe.step(x, target=y)
        norm = pipe.clip_grad_norm_(0.01)
    plain.micro_batched_step(reference, x, y, token_loss, 4)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    plain.assert_near(norm, expected)
    plain.assert_close(plain.gradients(model), plain.gradients(reference))
    together = torch.stack(
        [gradient.norm() for gradient in plain.gradients(model).values() if gradient is not None]
    )
    assert together.norm().item() == pytest.approx(0.01, rel=1e-4)


@each_schedule
def test_dropout_drops_the_same_wherever_the_model_is_cut(schedule: str) -> None:
    model = nn.Sequential(
        nn.Linear(6, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 2)
    )
    x, y = torch.randn(12, 6), torch.randn(12, 2)

    def train(borders: list[int], seed: int = 3) -> dict[str, Tensor | None]:
        ours = plain.twin(model)
        with cut_by_hand(ours, borders, loss_fn=nn.MSELoss(), micro_batches=4, schedule=schedule) as pipe:
            torch.manual_seed(seed)
            pipe.step(x, target=y)
        return plain.gradients(ours)

    whole = train([])
    for borders in ([1], [2], [1, 2, 3, 4]):
        plain.assert_same(train(borders), whole)
    with pytest.raises(AssertionError):
        plain.assert_same(train([2], seed=4), whole)


@each_schedule
def test_a_batch_that_does_not_divide_and_a_short_last_one(schedule: str) -> None:
    batches = [tokens(samples, 5) for samples in (10, 10, 3, 1)]
    steps_as_plainly(llama(), [2, 4], batches, token_loss, schedule)


@each_schedule
def test_sequences_of_another_length_in_the_next_step(schedule: str) -> None:
    batches = [tokens(8, length) for length in (5, 7, 1, 16)]
    steps_as_plainly(llama(), [2, 4], batches, token_loss, schedule)


@each_schedule
@pytest.mark.parametrize("borders", [[1], [2], [3], [1, 2, 3]])
def test_a_skip_connection_that_passes_over_stages(schedule: str, borders: list[int]) -> None:
    """What is skipped goes from stage to stage beside the rest, and so does its gradient."""
    model = plain.in_double([Enter(), Carry(), Carry(), Leave(), nn.Linear(WIDTH, 2)])
    x = torch.randn(9, WIDTH, dtype=torch.double)
    steps_as_plainly(model, borders, [(x, torch.randn(9, 2).double())] * 2, nn.MSELoss(), schedule, parts=3)


@each_schedule
def test_rotary_tables_in_buffers_and_heads_that_share_keys(schedule: str) -> None:
    model = llama()
    names = list(model.state_dict())
    steps_as_plainly(model, [1, 2, 3, 4, 5], [tokens(8, 6)] * 2, token_loss, schedule)
    assert list(model.state_dict()) == names
    assert not any("cos" in name for name in names)


@each_schedule
def test_a_layer_that_takes_another_way_by_its_input(schedule: str) -> None:
    """Both ways are taken within a mini-batch, so that only the same micro-batches are a fair comparison."""
    model = plain.in_double([nn.Linear(6, WIDTH), Depends(), nn.Tanh(), Depends(), nn.Linear(WIDTH, 2)])
    reference = plain.twin(model)
    taken = []
    for way in ("left", "right"):
        model.get_submodule(f"1.{way}").register_forward_hook(lambda *_, way=way: taken.append(way))
    x, y = torch.randn(13, 6).double(), torch.randn(13, 2).double()
    with cut_by_hand(model, [1, 3], loss_fn=nn.MSELoss(), micro_batches=6, schedule=schedule) as pipe:
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 6)
    assert set(taken) == {"left", "right"}
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


class Fussy(nn.Module):
    """Refuses one input."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 100).any()):
            raise OverflowError("more than a hundred")
        return x


@each_schedule
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_exception_on_one_device_arrives_as_it_is_and_the_next_step_is_right(
    schedule: str, place: int
) -> None:
    layers: list[nn.Module] = [nn.Identity(), nn.Identity(), nn.Identity(), nn.Linear(WIDTH, 2)]
    layers[place] = Fussy()
    model = plain.in_double(layers)
    x, y = torch.randn(8, WIDTH).double(), torch.randn(8, 2).double()
    bad = x.clone()
    bad[5] = 1000
    reference = plain.twin(model)
    with cut_by_hand(model, [1, 2], loss_fn=nn.MSELoss(), micro_batches=4, schedule=schedule) as pipe:
        with pytest.raises(OverflowError, match="more than a hundred") as caught:
            pipe.step(bad, target=y)
        model.zero_grad()
        pipe.step(x, target=y)
    notes = " ".join(caught.value.__notes__)
    assert f"layer '{place}' (Fussy)" in notes
    assert f"stage {place} of 3" in notes
    assert "micro-batch 2" in notes
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))
