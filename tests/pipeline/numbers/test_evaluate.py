"""The loss and the outputs of a mini-batch beside training: evaluate, return_outputs, merge, and gradients disabled."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.two_parts import Calls


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).double()


X, Y = torch.randn(7, 4).double(), torch.randn(7, 2).double()


def test_evaluate_gives_the_loss_in_evaluation_mode_and_changes_nothing():
    model = network()
    model[1].eval()  # frozen statistics within a model that trains
    reference = plain.twin(model).eval()
    modes = [module.training for module in model.modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = torch.get_rng_state()
    with cut_by_hand(model, [1, 3], loss_fn=nn.MSELoss(), recompute="always") as pipe:
        loss, output = pipe.evaluate(X, target=Y, return_outputs=True)
        assert pipe.evaluate(X, target=Y).equal(loss)
        assert [module.training for module in pipe.module.modules()] == modes
    plain.assert_near(loss, nn.functional.mse_loss(reference(X), Y))
    plain.assert_near(output, reference(X))
    assert not loss.requires_grad
    assert not output.requires_grad
    assert torch.get_rng_state().equal(before)
    assert all(parameter.grad is None for parameter in model.parameters())
    plain.assert_same(state, model.state_dict())


def test_modes_are_restored_when_evaluate_fails():
    def broken(output: Tensor, target: Tensor) -> Tensor:
        raise KeyError("on purpose")

    model = network()
    with cut_by_hand(model, [1], loss_fn=broken) as pipe:
        with pytest.raises(KeyError, match="on purpose"):
            pipe.evaluate(X, target=Y)
        assert all(module.training for module in model.modules())


def test_a_step_without_gradients_is_refused_and_evaluate_is_not():
    model = network()
    with cut_by_hand(model, [1, 3], loss_fn=nn.MSELoss()) as pipe, torch.no_grad():
        with pytest.raises(RuntimeError, match=r"step trains, and gradients are disabled.*pipe\.evaluate"):
            pipe.step(X, target=Y)
        assert model.state_dict()["1.num_batches_tracked"] == 0
        pipe.evaluate(X.clone(), target=Y.clone())


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_step_returns_the_outputs_beside_the_loss(recompute):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    expected = model(X).detach()
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss(), recompute=recompute) as pipe:
        loss, output = pipe.step(X, target=Y, return_outputs=True)
    plain.assert_near(output, expected)
    plain.assert_near(loss, nn.functional.mse_loss(expected, Y))
    assert not output.requires_grad


def swap() -> nn.Module:
    return Calls(lambda x: x.transpose(0, 1))


def halves_along_1(pair: tuple[Any, Any], parts: int) -> list[tuple[Any, Any]]:
    x, y = pair
    ys = [None] * parts if y is None else y.tensor_split(parts, 1)
    return list(zip(x.tensor_split(parts, 1), ys, strict=True))


def test_outputs_whose_first_dimension_is_not_that_of_samples_are_not_joined():
    x = torch.randn(7, 5, 4)
    with (
        cut_by_hand(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), [1], split=halves_along_1) as pipe,
        pytest.raises(ValueError, match=r"not split along its samples.*merge="),
    ):
        pipe(x)
    with (
        cut_by_hand(nn.Sequential(nn.Linear(4, 4), swap()), [1]) as pipe,
        pytest.raises(ValueError, match=r"output has shapes \[\[5, 3, 4\], \[5, 2, 4\].*merge="),
    ):
        pipe(x)
    with cut_by_hand(
        nn.Sequential(nn.Linear(4, 4), swap()), [1], merge=lambda outputs: torch.cat(outputs, dim=1)
    ) as pipe:
        assert pipe(x).allclose(pipe.module(x))


def test_values_that_are_no_tensors_are_kept_if_all_micro_batches_agree():
    x = torch.randn(8, 4)
    facts = Calls(lambda x: {"x": x, "name": "a", "width": x.shape[1]})
    with cut_by_hand(nn.Sequential(nn.Linear(4, 4), facts), [1]) as pipe:
        output = pipe(x)
    assert (output["name"], output["width"]) == ("a", 4)
    with (
        cut_by_hand(nn.Sequential(nn.Linear(4, 4), Calls(lambda x: {"x": x, "n": len(x)})), [1]) as pipe,
        pytest.raises(ValueError, match=r"output\['n'\] differs between micro-batches.*\[3, 3, 2\]"),
    ):
        pipe(x)
