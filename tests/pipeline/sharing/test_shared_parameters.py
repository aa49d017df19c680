"""Layers of different stages share parameters: one for the optimizer, its gradient that of plain training."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pipepart
from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.tied import Head, check, language_model, loss_fn, words

SCHEDULES = ["gpipe", "1f1b", "zb-h1"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("borders", [[1], [5], [1, 3, 5], [2, 3]], ids=str)
def test_a_tied_embedding_has_the_gradient_of_plain_training(borders, schedule):
    """Bit for bit: in each micro-batch the last use's gradient comes first."""
    check(language_model(), borders, *words(), schedule=schedule)


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-v", "v-min", "interleaved-zb"])
def test_stages_that_share_may_be_on_one_device(schedule):
    check(language_model(), [1, 3, 5], *words(), schedule=schedule, chunks=2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_tied_embedding_with_recompute(schedule):
    check(language_model(), [2, 4], *words(), schedule=schedule, recompute="always")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_layer_in_several_stages(schedule):
    twice = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), twice, nn.Tanh(), twice, nn.Linear(4, 4), twice)
    check(model, [1, 2, 4], torch.randn(7, 4), torch.randn(7, 4), nn.MSELoss(), schedule=schedule)


def test_a_block_with_parts_of_every_kind_in_several_stages():
    block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Linear(4, 4), block, block, block)
    check(model, [1, 2, 3], torch.randn(7, 3, 4), torch.randn(7, 3, 4), nn.MSELoss())


def test_a_recurrent_layer_in_several_stages():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.GRU(4, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)[0]

    recurrent = Recurrent()
    model = nn.Sequential(nn.Linear(4, 4), recurrent, nn.Tanh(), recurrent)
    check(model, [2], torch.randn(7, 3, 4), torch.randn(7, 3, 4), nn.MSELoss())
    model(torch.randn(2, 3, 4))


def test_a_normalised_weight_shared_by_stages():
    shared = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), shared, nn.Tanh(), shared)
    check(model, [2], torch.randn(7, 4), torch.randn(7, 4), nn.MSELoss())


def test_a_checkpointed_layer_in_several_stages():
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False)

    shared = Checkpointed()
    model = nn.Sequential(nn.Linear(4, 4), shared, nn.Tanh(), shared)
    check(model, [2], torch.randn(7, 4), torch.randn(7, 4), nn.MSELoss())


def test_a_sparse_gradient_meets_a_dense_one():
    embedding = nn.Embedding(9, 4, sparse=True)
    check(nn.Sequential(embedding, nn.Linear(4, 4), Head(embedding.weight)), [2], *words())


def test_the_parameter_stays_one_and_the_users():
    model = language_model()
    names = list(model.state_dict())
    parameters = list(model.parameters())
    x, y = words()
    with cut_by_hand(model, [1, 3, 5], loss_fn=loss_fn) as pipe:
        pipe.step(x, target=y)
        assert list(pipe.state_dict()) == names
        assert all(a is b for a, b in zip(pipe.parameters(), parameters, strict=True))
        assert len(list(pipe.parameters())) == len(parameters)
        assert model[5].weight is model[0].weight is model[2].weight
        assert type(model[5].weight) is nn.Parameter


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_training_ends_where_plain_training_ends(when, set_to_none):
    """An optimizer made before or after the pipeline, with clipping: all parameters bit for bit."""
    model = language_model()
    reference = plain.twin(model)

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)

    theirs = adam(reference.parameters())
    made = adam(model.parameters()) if when == "before" else None
    with cut_by_hand(model, [1, 3, 5], loss_fn=loss_fn) as pipe:
        ours = made or adam(pipe.parameters())
        for step in range(10):
            x, y = words(3 + step % 5)
            pipe.zero_grad(set_to_none)
            theirs.zero_grad(set_to_none)
            pipe.step(x, target=y)
            plain.micro_batched_step(reference, x, y, loss_fn, 3)
            norm = pipe.clip_grad_norm_(0.1)
            assert norm.equal(nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
            ours.step()
            theirs.step()
    plain.assert_same(model.state_dict(), reference.state_dict())


def test_hooks_see_one_parameter_with_the_whole_gradient():
    model = language_model()
    reference = plain.twin(model)
    seen: dict[str, list[Tensor]] = {"ours": [], "theirs": []}
    for side, root in (("ours", model), ("theirs", reference)):
        weight = root.get_parameter("0.weight")
        weight.register_hook(lambda gradient, side=side: seen[side].append(gradient.clone()))
        weight.register_post_accumulate_grad_hook(lambda p, side=side: seen[side].append(p.grad.clone()))
    x, y = words()
    with cut_by_hand(model, [1, 3, 5], loss_fn=loss_fn) as pipe:
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, loss_fn, 3)
    assert len(seen["ours"]) == len(seen["theirs"]) == 6
    assert all(a.equal(b) for a, b in zip(seen["ours"], seen["theirs"], strict=True))


def test_the_output_can_be_differentiated():
    model = language_model().double()
    reference = plain.twin(model)
    x, y = words()
    with cut_by_hand(model, [1, 3, 5]) as pipe:
        first, second = pipe(x), pipe(x[:4])
        (loss_fn(first, y) + second.pow(2).mean()).backward()
    (loss_fn(reference(x), y) + reference(x[:4]).pow(2).mean()).backward()
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_a_micro_batch_whose_targets_are_all_ignored():
    model = language_model().double().append(Transpose())
    reference = plain.twin(model)
    x, y = words(6)
    y[:2] = -100
    with cut_by_hand(model, [1, 3, 5], loss_fn=nn.CrossEntropyLoss()) as pipe:
        pipe.step(x, target=y)
    plain.whole_step(reference, x, y, nn.CrossEntropyLoss())
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


class Transpose(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def test_a_plan_may_part_what_the_planner_keeps_together(tmp_path):
    """Edited by hand and loaded again."""
    model = language_model()
    reference = plain.twin(model)
    x, y = words(6)
    profile = pipepart.profile(model, x, target=y, loss_fn=loss_fn, micro_batches=3, seconds=0.01)
    plan = pipepart.plan(profile, pipepart.Cluster.virtual(1), schedule="1f1b")
    assert plan.stages[0].layers == ("0", "1", "2", "3", "4", "5")
    parted = cut_by_hand(copy.deepcopy(model), [3])
    edited = plan.model_copy(update={"stages": parted.plan.stages, "cluster": parted.plan.cluster})
    parted.close()
    edited.save(tmp_path / "plan.json")
    with pipepart.Pipeline(model, pipepart.Plan.load(tmp_path / "plan.json"), loss_fn=loss_fn) as pipe:
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, loss_fn, 3)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))
