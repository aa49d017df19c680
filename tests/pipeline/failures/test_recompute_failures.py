"""A second forward that fails, or cannot be made: what the caller gets, and that the next step works."""

import pytest
import torch
from torch import Tensor, nn

from tests.support import plain
from tests.support.chains import cut_by_hand


class Trouble(Exception):
    pass


@pytest.mark.parametrize("drop_in", [False, True])
def test_an_exception_in_the_second_forward(drop_in):
    """Its own type; notes that name the layer, which forward, the stage and the micro-batch; then a good step."""

    class Fuse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == burning:
                raise Trouble
            return x * 1

    calls, burning = 0, 0
    norm = nn.BatchNorm1d(4)
    running = norm.running_mean
    model = nn.Sequential(nn.Linear(4, 4), norm, Fuse(), nn.Linear(4, 4))
    reference = plain.twin(model)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    burning = 4 + 2  # gpipe: all first forwards, then the second ones
    with cut_by_hand(
        model,
        [1, 3],
        loss_fn=None if drop_in else nn.MSELoss(),
        micro_batches=4,
        schedule="gpipe",
        recompute="always",
    ) as pipe:
        train = (lambda: pipe(x).sum().backward()) if drop_in else (lambda: pipe.step(x, target=y))
        with pytest.raises(Trouble) as caught:
            train()
        first, second = caught.value.__notes__
        assert first == "pipepart: in the second forward of layer '2' (Fuse)"
        assert second.startswith(
            "pipepart: on stage 1 of 3 on virtual:1, micro-batch 1 of 4 (action 1RECOMPUTE1)"
        )
        assert norm.running_mean is running
        assert norm.num_batches_tracked == 4
        burning = 0
        pipe.zero_grad()
        train()
    if drop_in:
        plain.micro_batched_step(reference, x, y, lambda output, _: output.sum(), 4, mean=False)
    else:
        plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
    plain.assert_close(plain.gradients(model), plain.gradients(reference), 1e-6)


def test_layers_that_do_something_else_the_second_time_are_refused():
    class Fickle(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            self.calls += 1
            return (x * 1, x * 2) if self.calls > 3 else (x * 1, x.detach())

    class First(nn.Module):
        def forward(self, pair: tuple[Tensor, ...]) -> Tensor:
            return pair[0]

    model = nn.Sequential(nn.Linear(4, 4), Fickle(), First())
    with (
        cut_by_hand(model, [2], loss_fn=nn.MSELoss(), schedule="gpipe", recompute="always") as pipe,
        pytest.raises(RuntimeError, match=r"second forward made 2 tensors .* the first 1") as caught,
    ):
        pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))
    assert "stage 0 of 2" in caught.value.__notes__[-1]
