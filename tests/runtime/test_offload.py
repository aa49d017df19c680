"""Stages that keep what they save on the host: nothing is left behind, and errors are those without."""

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from pipepart import Plan
from pipepart.emulation.transport import Clock, EmulatedHostLink
from pipepart.runtime.offload.copy_queues import CopyQueue
from tests.support import plain
from tests.support.chains import cut_by_hand, plan_by_hand
from tests.support.two_parts import Calls

pytestmark = pytest.mark.usefixtures("short_profiles")


def chain(layers: int = 6, width: int = 64) -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())])


def test_a_graph_that_is_dropped_and_forwards_without_gradients():
    """The caller's loss: all forwards run, then all backwards."""
    model = chain(2)
    reference = plain.twin(model)
    x = torch.randn(24, 64)
    with cut_by_hand(model, [2], micro_batches=6, offload="stash") as pipe:
        pipe(x)
        with torch.no_grad():
            plain.assert_near(pipe(x), reference(x), 1e-6)
        for _ in range(2):
            pipe(x).square().sum().backward()
            for part in x.tensor_split(6):
                reference(part).square().sum().backward()
    plain.assert_close(plain.gradients(model), plain.gradients(reference), 1e-5)


def test_nothing_is_left_on_the_host(monkeypatch: pytest.MonkeyPatch):
    copies: list[weakref.ref[Tensor]] = []
    finish = CopyQueue.finish_out

    def noted(queue: CopyQueue, copy: Any) -> Sequence[Tensor]:
        made = finish(queue, copy)
        copies.extend(map(weakref.ref, made))
        return made

    monkeypatch.setattr(CopyQueue, "finish_out", noted)
    with cut_by_hand(
        chain(), [6], loss_fn=nn.MSELoss(), micro_batches=8, offload="stash", schedule="gpipe"
    ) as pipe:
        pipe.step(torch.randn(24, 64), target=torch.randn(24, 64))
        gc.collect()
        assert len(copies) >= 2 * 6 * 5
        assert not [one for one in copies if one() is not None]


def overwriting(x: Tensor) -> Tensor:
    """Writes into a tensor that its own backward needs."""
    y = x.exp()
    z = y * 2
    y.add_(1)
    return z


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_a_saved_tensor_that_was_overwritten_is_an_error_as_without(schedule: str):
    model = nn.Sequential(nn.Linear(4, 4), Calls(overwriting), nn.Linear(4, 4))
    with (
        cut_by_hand(
            model, [2], loss_fn=nn.MSELoss(), micro_batches=6, schedule=schedule, offload="stash"
        ) as pipe,
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
    ):
        pipe.step(torch.randn(12, 4), target=torch.randn(12, 4))


def test_hooks_of_the_caller_give_way_in_stages_that_offload():
    how: dict[str, Any] = {"schedule": "gpipe", "micro_batches": 6, "offload": "stash"}
    x, y = torch.randn(2, 12, 64)
    with cut_by_hand(chain(2), [2], loss_fn=nn.MSELoss(), **how) as pipe, save_on_cpu():
        plain.check_step(pipe, x, y, nn.MSELoss(), 6)


def test_an_emulated_link_carries_one_copy_at_a_time():
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    queue = EmulatedHostLink(1000.0, Clock(lambda: now, sleep))
    first, second = torch.ones(250), torch.ones(500)
    out = [queue.start_out([first, first[:10]]), queue.start_out([second])]
    assert [copy.done_at for copy in out] == [1, 3]
    queue.wait(out[0])
    on_host = queue.finish_out(out[0])
    assert now == 1
    back = queue.start_back(on_host)
    assert back.done_at == 4
    queue.wait(out[1])
    assert now == 3
    queue.wait(back)
    assert now == 4
    assert torch.equal(back.tensors[0], first)
    assert back.tensors[1].data_ptr() == back.tensors[0].data_ptr()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recompute": "always"}, "stage 0 offloads its stash and recomputes it"),
        ({"schedule": "pipedream"}, "asynchronous: its stages keep versions"),
    ],
)
def test_plans_that_cannot_offload_are_refused(change: dict[str, Any], message: str):
    fields: dict[str, Any] = plan_by_hand(["0", "1", "2"], [1], micro_batches=6, offload="stash").model_dump()
    fields["stages"][0]["recompute"] = change.pop("recompute", "never")
    with pytest.raises(ValueError, match=message):
        Plan.model_validate({**fields, **change})
