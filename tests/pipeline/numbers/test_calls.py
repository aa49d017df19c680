"""A pipeline in the place of the model: its output and what plain code does with it, evaluation, names."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.two_parts import Calls


def with_norm(*last: nn.Module) -> nn.Sequential:
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.ReLU(inplace=True), nn.LayerNorm(6)]
    return plain.in_double([*layers, *(last or [nn.Linear(6, 4)])])


def pair() -> nn.Sequential:
    return with_norm(Calls(lambda x: (x.tanh(), x.exp())))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("samples", "strict"), [(1, False), (7, True)])
def test_the_output_is_the_plain_models_without_gradients(mode, samples, strict):
    model, x = with_norm(), torch.randn(samples, 4).double()
    with cut_by_hand(model, [1, 3], strict=strict) as pipe, mode():
        output = pipe(x)
    plain.assert_near(output, model(x).detach())
    assert not output.requires_grad
    assert output.is_inference() == (mode is torch.inference_mode)


# What a script may do with a model and an input.
USES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Any]]] = {
    "the second of two outputs": (pair, lambda run, x: run(x)[1].sum().backward()),
    "some rows": (with_norm, lambda run, x: run(x)[4:6].pow(2).sum().backward()),
    "one backward of two outputs": (
        with_norm,
        lambda run, x: (run(x).sum() * run(x[:5]).pow(2).mean()).backward(),
    ),
    "outputs that go backward in the other order": (
        with_norm,
        lambda run, x: [out.pow(2).sum().backward() for out in reversed([run(x), run(x[:5])])],
    ),
    "an output that is fed back": (with_norm, lambda run, x: run(run(x)).pow(2).sum().backward()),
    "a graph before and behind": (with_norm, lambda run, x: run(x.tanh() * 2).sin().sum().backward()),
}


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("use", USES)
def test_gradients_are_the_plain_models(use, recompute):
    make, do = USES[use]
    model = make()
    reference = plain.twin(model)
    ours = torch.randn(9, 4).double().requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    with cut_by_hand(model, [1, 3], recompute=recompute) as pipe:
        do(pipe, ours)
    do(reference, theirs)
    plain.assert_close({"input": ours.grad}, {"input": theirs.grad})
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


@pytest.mark.parametrize("way", ["grad", "inputs"])
def test_gradients_of_the_input_alone_leave_the_parameters_alone(way):
    """As ``torch.autograd.grad`` does, which a penalty on gradients or a saliency map uses."""
    model = with_norm()
    x = nn.Linear(4, 4).double()(torch.randn(7, 4).double()).detach().requires_grad_()
    expected = torch.autograd.grad(model(x).pow(2).sum(), x)[0]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    start = plain.gradients(model)
    with cut_by_hand(model, [1, 3]) as pipe:
        loss = pipe(x).pow(2).sum()
        if way == "grad":
            found = torch.autograd.grad(loss, x)[0]
        else:
            loss.backward(inputs=[x])
            found = x.grad
    plain.assert_close({"x": found}, {"x": expected})
    plain.assert_same(plain.gradients(model), start)


def test_second_derivatives_and_second_backwards_are_refused():
    with cut_by_hand(with_norm(), [1, 3]) as pipe:
        x = torch.randn(7, 4).double().requires_grad_()
        with pytest.raises(RuntimeError, match=r"create_graph=True: a pipeline has no second derivatives"):
            torch.autograd.grad(pipe(x).pow(3).sum(), x, create_graph=True)
        loss = pipe(x).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_what_is_written_before_the_backward_is_noticed(recompute):
    model = with_norm()
    with cut_by_hand(model, [1, 3], recompute=recompute) as pipe:
        x = torch.randn(7, 4).double()
        output = pipe(x)
        x.zero_()
        with pytest.raises(
            RuntimeError, match="the input of a pipeline was modified by an inplace operation"
        ):
            output.sum().backward()
        pipe(x).sum().backward()
        output = pipe(x)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_an_input_that_only_some_micro_batches_use_has_zeros_in_the_others():
    choose = Calls(lambda nest: nest["a"] * 2 if bool(nest["a"].detach().sum() > 0) else nest["b"] * 3)
    a, b = torch.tensor([[1.0], [-1.0]], requires_grad=True), torch.ones(2, 1, requires_grad=True)
    with cut_by_hand(nn.Sequential(choose, nn.Identity()), [1], micro_batches=2) as pipe:
        pipe({"a": a, "b": b}).sum().backward()
    zero_elsewhere = {"a": torch.tensor([[2.0], [0.0]]), "b": torch.tensor([[0.0], [3.0]])}
    plain.assert_same({"a": a.grad, "b": b.grad}, zero_elsewhere)


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


WORDS, PAIRS = torch.randint(9, (6, 3)), torch.randn(6, 2)
LAYERS = ["embed", "body.0", "body.1.0", "body.1.1.0", "body.2", "head.norm", "head.flat", "head.out"]


def nested() -> nn.Sequential:
    norm = nn.Sequential(nn.ReLU(), nn.Sequential(nn.LayerNorm(4)))
    head: OrderedDict[str, nn.Module] = OrderedDict(
        norm=nn.BatchNorm1d(3), flat=nn.Flatten(), out=nn.Linear(12, 2)
    )
    body = nn.Sequential(nn.Linear(4, 4), norm, nn.Identity())
    return nn.Sequential(OrderedDict(embed=nn.Embedding(9, 4), body=body, head=nn.Sequential(head)))


def test_names_and_parameters_are_those_of_the_unwrapped_model():
    model = nested()
    names, before = list(model.state_dict()), list(model.parameters())
    with cut_by_hand(model, [2, 5], loss_fn=nn.MSELoss()) as pipe:
        pipe.step(WORDS, target=PAIRS)
        assert all(a is b for a, b in zip(pipe.parameters(), before, strict=True))
        assert list(pipe.state_dict()) == names
        assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in model.named_parameters()]
        assert pipe.module is model
        assert [layer for stage in pipe.plan.stages for layer in stage.layers] == LAYERS
        with pytest.raises(RuntimeError, match=r"Missing key.*embed\.weight"):
            pipe.load_state_dict({})


def test_the_model_stays_usable_beside_the_pipeline_and_after_it():
    """And what is changed in the model is seen by the pipeline."""
    model = nested()
    pipe = cut_by_hand(model, [2, 5])
    assert pipe.eval() is pipe
    assert not any(module.training for module in (pipe, *model.modules()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
        expected = model(WORDS)
        assert pipe(WORDS).equal(expected)
    assert pipe.train() is pipe
    assert all(module.training for module in model.modules())
    pipe.close()
    with torch.no_grad():
        assert model.eval()(WORDS).equal(expected)


def test_a_layer_that_is_replaced_afterwards_is_not_trained_in_its_old_form():
    model = nested()
    with cut_by_hand(model, [2, 5], loss_fn=nn.MSELoss()) as pipe:
        body = model.body
        assert isinstance(body, nn.Sequential)
        kept, body[0] = body[0], nn.Linear(4, 4)
        for call in (
            lambda: pipe.step(WORDS, target=PAIRS),
            lambda: pipe(WORDS),
            lambda: pipe.evaluate(WORDS, target=PAIRS),
        ):
            with pytest.raises(RuntimeError, match=r"layer 'body\.0' was replaced.*Make another Pipeline"):
                call()
        body[0] = kept
        body.append(nn.Identity())
        with pytest.raises(RuntimeError, match="had 3 layers when the pipeline was made and has 4"):
            pipe.step(WORDS, target=PAIRS)
