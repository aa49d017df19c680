"""The error of a failed replay check names the first call or module that differs."""

import itertools
import multiprocessing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipepart.capture import CaptureError, RecordedChain, chain_of
from tests.support.recorded import chain_for

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """Three blocks with something between them."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1:
                x = self.between(x)
        return x


def refusal(between: Any, **options: Any) -> str:
    with pytest.raises(CaptureError) as caught:
        chain_for(Model(between), X, loss_fn=nn.functional.mse_loss, **options)
    return str(caught.value)


def test_a_way_that_changes_is_named():
    ways = itertools.cycle([torch.tanh, torch.sin, torch.cos, torch.abs])
    message = refusal(lambda x: next(ways)(x))
    assert "a replay of Model gives other numbers than the model. " in message
    assert "Two forwards with the same arguments take different ways" in message
    assert "and before it was tanh at capture/test_verification.py:" in message
    assert message.endswith(
        'layers=[...] says which modules stay whole; verify="never" trains without this check'
    )


def test_a_value_that_no_call_is_given_is_not_named():
    numbers = itertools.count(1)

    def scaled(value: float) -> float:
        return value * next(numbers)

    message = refusal(lambda x: x + x.detach().clone().apply_(scaled))
    assert "The code between modules depends on what a replay does not see" in message
    assert "pipepart.check names the first module that differs" in message


def test_a_replay_is_compared_again_in_steps_2_4_and_8():
    factor = multiprocessing.Value("d", 1.0)  # which is nowhere in Python that could be looked at
    model = Model(lambda x: x * factor.value)
    chain = chain_for(model, X, loss_fn=nn.functional.mse_loss)
    assert isinstance(chain, RecordedChain)
    chain.bind_all([((X[:4],), {}), ((X[4:],), {})])
    chain.bind_all([((X[:4],), {}), ((X[4:],), {})])
    factor.value = 2.0
    with pytest.raises(
        CaptureError, match=r"mul\(\) at .* is given 1\.0 in one forward and 2\.0 in the next"
    ):
        chain.bind_all([((X[:4],), {}), ((X[4:],), {})])


@pytest.mark.parametrize(
    ("verify", "forwards"), [("first", [2, 3, 4]), ("always", [2, 4, 6]), ("never", [1, 2, 3])]
)
def test_other_lengths_are_compared_with_what_was_recorded(verify, forwards):
    model = Model(torch.tanh)
    calls = itertools.count(1)

    def count(*_: Any) -> None:
        next(calls)

    model.register_forward_hook(count)
    chain = chain_of(model, verify=verify, split_loss=False)
    assert isinstance(chain, RecordedChain)
    for expected, length in zip(forwards, (2, 3, 4), strict=True):
        chain.bind((X[:length],), {})
        assert repr(calls) == f"count({expected + 1})"
