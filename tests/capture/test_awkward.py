"""Models that break tracers: right, bit for bit, or refused; the error names the first call that differs."""

import itertools
import multiprocessing
import re
from typing import Any

import pytest
import torch
from torch import nn

from pipepart.capture import CaptureError, RecordedChain, chain_of
from pipepart.capture.recorded.recording import interception
from tests.capture import (  # they fill the tables
    awkward_blocks,
    awkward_blocks_shared,
    awkward_code,
    awkward_reads,  # noqa: F401
    awkward_sequentials,
    awkward_state,  # noqa: F401
)
from tests.capture.families import quick
from tests.support.awkward import REFUSED, RIGHT, Base
from tests.support.recorded import assert_same_step, chain_for, piped

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(4))
LAST_RESORT = r"As a last resort, layers=\[\"\"\] makes the whole model one layer"


def loss_fn(output, target):
    return (output[:, :6] - target).square().mean()


QUICK = [(name, ("never", "always")[index % 2]) for index, name in enumerate(RIGHT)]


@pytest.mark.parametrize(("name", "recompute"), quick(QUICK, itertools.product(RIGHT, ("never", "always"))))
def test_right(name, recompute):
    torch.manual_seed(0)
    layers = len(chain_for(RIGHT[name](), X, loss_fn=loss_fn, parts=4).layers)
    torch.manual_seed(0)
    assert_same_step(
        RIGHT[name](),
        X,
        target=Y,
        loss_fn=loss_fn,
        borders=list(range(1, layers)),
        parts=4,
        recompute=recompute,
    )


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    kind, message = REFUSED[name]
    torch.manual_seed(0)
    with (
        pytest.raises(CaptureError, match=message) as caught,
        piped(kind(), X, loss_fn=loss_fn, parts=4) as pipe,
    ):
        pipe.step(X, target=Y)
    if name == "SetsTheModeOfABlock":
        assert re.search(LAST_RESORT, str(caught.value))


@pytest.mark.parametrize(
    "kind",
    [
        awkward_blocks_shared.BlocksCountForThemselves,
        awkward_blocks.NamesAnAttributeOfItsOwnAsBlocksDo,
        awkward_blocks.CallsABlockThatCountsTwice,
        awkward_sequentials.SequentialCallsALayerThatCountsTwice,
    ],
)
def test_what_blocks_count_and_draw_is_not_advanced_by_recordings(kind):
    assert_same_step(kind(), X, target=Y, loss_fn=loss_fn, stages=2, parts=4)


def test_a_custom_function_that_torch_hides_is_refused(monkeypatch):
    """As an alias of ``apply`` is since torch 2.14."""
    monkeypatch.setattr(interception, "_APPLY_IS_C", True)
    with pytest.raises(
        CaptureError, match=r"_Double\.apply is called by another name before capture/awkward_code"
    ):
        chain_for(awkward_code.AliasOfAFunction(), X, loss_fn=loss_fn)


def Model(between: Any) -> nn.Module:
    """Three blocks with something behind them."""
    return type("Model", (Base,), {"after": lambda self, x: between(x)})()


def refusal(between: Any, **options: Any) -> str:
    with pytest.raises(CaptureError) as caught:
        chain_for(Model(between), X, loss_fn=nn.functional.mse_loss, **options)
    return str(caught.value)


def test_a_way_that_changes_is_named():
    ways = itertools.cycle([torch.tanh, torch.sin, torch.cos, torch.abs])
    message = refusal(lambda x: next(ways)(x))
    assert "a replay of Model gives other numbers than the model. " in message
    assert "Two forwards with the same arguments take different ways" in message
    assert "and before it was tanh at capture/test_awkward.py:" in message
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
