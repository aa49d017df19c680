"""Inputs and outputs of a step on a GPU: pinned memory can be reused at once, and the caller's stream is respected."""

import pytest
import torch
from torch import Tensor, nn

from tests.gpu.late import borders, late_chain
from tests.support import plain
from tests.support.on_devices import cut_on, gradients, sample


def test_pinned_mini_batches_may_be_filled_anew_when_a_step_returns(devices):
    model = late_chain(len(devices))
    reference = plain.twin(model)
    with cut_on(devices, model, borders(len(devices)), nn.MSELoss()) as pipe:
        x, y = sample(16, 64)
        pinned = x.pin_memory(), y.pin_memory()
        pipe.step(pinned[0], target=pinned[1])
        pinned[0].zero_()
        pinned[1].zero_()
        plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
        plain.assert_close(gradients(model), plain.gradients(reference), 1e-9)


class OnStream(nn.Module):
    """Notes the stream that it runs on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(torch.cuda.current_stream().cuda_stream)
        return x * 1


@pytest.mark.parametrize("alone", [True, False])
def test_a_worker_that_has_a_gpu_alone_computes_on_the_stream_of_the_caller(alone):
    layer, stream = OnStream(), torch.cuda.Stream()
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4)).double()
    with cut_on(("cuda:0",) * (1 if alone else 2), model, [] if alone else [2], nn.MSELoss()) as pipe:
        x, y = sample(8, 4)
        with torch.cuda.stream(stream):
            pipe.step(x.cuda(), target=y.cuda())
        assert (layer.seen == {stream.cuda_stream}) == alone
