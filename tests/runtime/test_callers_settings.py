"""Settings that torch keeps by thread are those of the caller in every layer."""

import torch
from torch import Tensor, nn

from pipepart import Pipeline
from tests.support.chains import plan_by_hand


class Looks(nn.Module):
    """Notes the settings that its forward sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[bool, bool]] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add((torch.is_autocast_cache_enabled(), torch._C._is_multithreading_enabled()))
        return x * 1


def test_layers_see_the_callers_cache_of_autocast_and_threads_of_autograd():
    looks = [Looks(), Looks()]
    model = nn.Sequential(looks[0], nn.Linear(2, 2), looks[1])
    plan = plan_by_hand(["0", "1", "2"], [1], micro_batches=2)
    x, y = torch.ones(4, 2), torch.zeros(4, 2)
    with Pipeline(model, plan, nn.MSELoss()) as pipe:
        with (
            torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
            torch.autograd.set_multithreading_enabled(False),
        ):
            pipe.step(x, target=y)
        assert [one.seen for one in looks] == [{(False, False)}] * 2
        with torch.autocast("cpu", torch.bfloat16):
            pipe.step(x, target=y)
        assert [one.seen for one in looks] == [{(False, False), (True, True)}] * 2
