"""Models that break tracers: their pipelines are right, bit for bit, or refused; none is silently wrong."""

import pytest
import torch

from pipepart.capture import CaptureError
from tests.capture.awkward import REFUSED, RIGHT
from tests.support.recorded import assert_same_step, chain_for, piped

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(4))


def loss_fn(output, target):
    return (output[:, :6] - target).square().mean()


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("recompute", ["never", "always"])
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
    with pytest.raises(CaptureError, match=message), piped(kind(), X, loss_fn=loss_fn, parts=4) as pipe:
        pipe.step(X, target=Y)
