"""Models that break tracers: their pipelines are right, bit for bit, or refused; none is silently wrong."""

import itertools
import re

import pytest
import torch

from pipepart.capture import CaptureError
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
from tests.support.awkward import REFUSED, RIGHT
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
