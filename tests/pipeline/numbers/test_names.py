"""The model keeps its names and its objects: a checkpoint knows nothing of stages."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from tests.support.chains import cut_by_hand

X, Y = torch.randint(9, (6, 3)), torch.randn(6, 2)
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
        pipe.step(X, target=Y)
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
        expected = model(X)
        assert pipe(X).equal(expected)
    assert pipe.train() is pipe
    assert all(module.training for module in model.modules())
    pipe.close()
    with torch.no_grad():
        assert model.eval()(X).equal(expected)


def test_a_layer_that_is_replaced_afterwards_is_not_trained_in_its_old_form():
    model = nested()
    with cut_by_hand(model, [2, 5], loss_fn=nn.MSELoss()) as pipe:
        body = model.body
        assert isinstance(body, nn.Sequential)
        kept, body[0] = body[0], nn.Linear(4, 4)
        for call in (lambda: pipe.step(X, target=Y), lambda: pipe(X), lambda: pipe.evaluate(X, target=Y)):
            with pytest.raises(RuntimeError, match=r"layer 'body\.0' was replaced.*Make another Pipeline"):
                call()
        body[0] = kept
        body.append(nn.Identity())
        with pytest.raises(RuntimeError, match="had 3 layers when the pipeline was made and has 4"):
            pipe.step(X, target=Y)
