"""Layers of different stages share parameters: one for the optimizer, followed whatever the caller does with it."""

import copy
from collections.abc import Callable
from operator import is_
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipepart
from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.pieces import WIDTH, Recurrent
from tests.support.tied import cut_apart, language_model, loss_fn, new_values, words

pytestmark = pytest.mark.usefixtures("short_profiles")

each_cut = pytest.mark.parametrize("cut", [cut_by_hand, cut_apart], ids=["on one device", "on devices apart"])


@each_cut
@pytest.mark.parametrize("set_to_none", [True, False])
def test_training_ends_where_plain_training_ends(cut, set_to_none):
    """With clipping: all parameters bit for bit, and the parameter stays one and the user's."""
    model = language_model()
    reference = plain.twin(model)
    names, parameters = list(model.state_dict()), list(model.parameters())
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, reference))
    with cut(model, [1, 3, 5], loss_fn=loss_fn) as pipe:
        for step in range(3):
            x, y = words(3 + step)
            pipe.zero_grad(set_to_none)
            theirs.zero_grad(set_to_none)
            pipe.step(x, target=y)
            plain.micro_batched_step(reference, x, y, loss_fn, 3)
            norm = pipe.clip_grad_norm_(0.1)
            assert norm.equal(nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
            ours.step()
            theirs.step()
        assert list(pipe.state_dict()) == names
        assert all(a is b for a, b in zip(pipe.parameters(), parameters, strict=True))
    plain.assert_same(model.state_dict(), reference.state_dict())
    assert model[5].weight is model[0].weight is model[2].weight
    assert type(model[5].weight) is nn.Parameter


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


@each_cut
def test_two_outputs_wait_for_one_backward(cut):
    model = language_model().double()
    reference = plain.twin(model)
    x, y = words()
    with cut(model, [1, 3, 5], loss_fn=loss_fn) as pipe:
        first, second = pipe(x), pipe(x[:4])
        (loss_fn(first, y) + second.pow(2).mean()).backward()
    (loss_fn(reference(x), y) + reference(x[:4]).pow(2).mean()).backward()
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


@each_cut
def test_writing_a_parameter_before_the_backward_is_refused_as_torch_refuses_it(cut):
    """On devices apart the copy that the first forward has saved is written before a second forward."""
    model = language_model()
    x, y = words()
    with cut(model, [1, 3, 5], loss_fn=loss_fn) as pipe:
        loss = loss_fn(pipe(x), y)
        new_values(model)
        pipe(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def new_storage(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.detach() * 2


def untraced_values(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(2)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "values": new_values,
    "values without a trace": untraced_values,
    "storage": new_storage,
    "dtype": nn.Module.double,
    "frozen": lambda model: model.get_parameter("0.weight").requires_grad_(False),
    "state dict": lambda model: model.load_state_dict(language_model().state_dict()),
    "assigned": lambda model: model.load_state_dict(
        {name: tensor.clone() for name, tensor in language_model().state_dict().items()}, assign=True
    ),
    "settings": lambda model: setattr(model.get_submodule("3"), "eps", 1.0),
}


@each_cut
@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_steps_are_followed(change, cut):
    model = language_model()
    x, y = words()
    with cut(model, [1, 3, 5], loss_fn=loss_fn) as pipe:
        pipe.step(x, target=y)
        CHANGES[change](model)
        pipe.zero_grad()
        reference = plain.twin(model)
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, loss_fn, 3)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


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


@each_cut
def test_the_flat_weights_of_a_recurrent_layer_stay_its_own(cut):
    """A stage that ends its step first must not put its replicas where another stage still runs the layer."""
    layer = Recurrent()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.Tanh(), layer, nn.Linear(WIDTH, WIDTH))
    with cut(model, [2], loss_fn=nn.MSELoss()) as pipe:
        pipe.step(torch.randn(6, WIDTH), target=torch.randn(6, WIDTH))
        assert all(map(is_, layer.inner._flat_weights, layer.inner.parameters()))
