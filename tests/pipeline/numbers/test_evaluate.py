"""The loss and the outputs of a mini-batch beside training: evaluate, return_outputs, merge, and gradients disabled."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.two_parts import Calls

X, Y = torch.randn(7, 4).double(), torch.randn(7, 2).double()


def network() -> nn.Sequential:
    return plain.in_double([nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)])


def test_evaluate_gives_the_loss_in_evaluation_mode_and_changes_nothing():
    model = network()
    model[1].eval()  # frozen statistics within a model that trains
    reference = plain.twin(model).eval()
    modes = [module.training for module in model.modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = torch.get_rng_state()
    fails = False

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if fails:
            raise KeyError("on purpose")
        return nn.functional.mse_loss(output, target)

    with cut_by_hand(model, [1, 3], loss_fn=loss_fn, recompute="always") as pipe:
        loss, output = pipe.evaluate(X, target=Y, return_outputs=True)
        with pytest.raises(ValueError, match="target has 5 samples"):
            pipe.evaluate(X, target=Y[:5])
        with torch.no_grad():
            assert pipe.evaluate(X, target=Y).equal(loss)
            with pytest.raises(
                RuntimeError, match=r"step trains, and gradients are disabled.*pipe\.evaluate"
            ):
                pipe.step(X, target=Y)
        fails = True
        with pytest.raises(KeyError, match="on purpose"):
            pipe.evaluate(X, target=Y)
    plain.assert_near(loss, nn.functional.mse_loss(reference(X), Y))
    plain.assert_near(output, reference(X))
    assert not loss.requires_grad
    assert not output.requires_grad
    assert torch.get_rng_state().equal(before)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    plain.assert_same(state, model.state_dict())


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_step_returns_the_outputs_beside_the_loss(recompute):
    model = plain.in_double([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)])
    expected = model(X).detach()
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss(), recompute=recompute) as pipe:
        loss, output = pipe.step(X, target=Y, return_outputs=True)
    plain.assert_near(output, expected)
    plain.assert_near(loss, nn.functional.mse_loss(expected, Y))
    assert not output.requires_grad


def halves_along_1(pair: tuple[Any, Any], parts: int) -> list[tuple[Any, Any]]:
    return [(part, None) for part in pair[0].tensor_split(parts, 1)]


def swapped(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


# What the last layer returns, options of the pipeline, and what is said.
UNJOINED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "split along 1": (lambda x: x, {"split": halves_along_1}, r"not split along its samples.*merge="),
    "samples along 1": (swapped, {}, r"output has shapes \[\[5, 3, 4\], \[5, 2, 4\].*merge="),
    "rows that are no samples": (lambda x: x.new_ones(5, 4), {}, r"has shapes \[\[5, 4\].*merge="),
    "other values": (lambda x: {"x": x, "n": len(x)}, {}, r"output\['n'\] differs .*\[3, 2, 2\]"),
}


@pytest.mark.parametrize("name", UNJOINED)
def test_outputs_that_cannot_be_joined_are_refused(name):
    last, options, says = UNJOINED[name]
    model = nn.Sequential(nn.Linear(4, 4), Calls(last))
    with cut_by_hand(model, [1], **options) as pipe, pytest.raises(ValueError, match=says):
        pipe(torch.randn(7, 5, 4))


def test_outputs_are_joined_by_the_caller_and_values_that_all_micro_batches_agree_on_are_kept():
    x = torch.randn(7, 5, 4)
    model = nn.Sequential(nn.Linear(4, 4), Calls(swapped))
    with cut_by_hand(model, [1], merge=lambda outputs: torch.cat(outputs, dim=1)) as pipe:
        assert pipe(x).allclose(model(x))
    facts = Calls(lambda x: {"x": x, "name": "a", "width": x.shape[-1]})
    with cut_by_hand(nn.Sequential(nn.Linear(4, 4), facts), [1]) as pipe:
        output = pipe(x)
    assert (len(output["x"]), output["name"], output["width"]) == (7, "a", 4)
