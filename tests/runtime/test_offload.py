"""Stages that keep what they save on the host: the same numbers, less memory, and nothing left behind."""

import gc
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from pipepart import Cluster, Pipeline, Plan
from pipepart.emulation.transport import Clock, EmulatedHostLink
from pipepart.runtime.offload.copy_queues import CopyQueue
from tests.support import plain
from tests.support.chains import Offload, Recompute, cut_by_hand, plan_by_hand
from tests.support.recorded import chain_for
from tests.support.skipping import WIDTH, Hourglass

pytestmark = pytest.mark.usefixtures("short_profiles")


class Tied(nn.Module):
    """Multiplies by the weight of another layer."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Halves(nn.Module):
    """Saves two views of one tensor, one of them with gaps, and the tensor itself."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        return torch.cat([y[:, ::2] * y[:, 1::2], y.sin()], dim=1)


def network() -> nn.Sequential:
    """Convolutions, BatchNorm, dropout, writes in place, views, and a weight that two stages share."""
    torch.manual_seed(0)
    first = nn.Linear(64, 64, bias=False)
    layers = [
        *(nn.Flatten(), first, nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)),
        *(nn.ReLU(inplace=True), nn.Dropout(0.3), nn.MaxPool2d(2), nn.Flatten(), Tied(first.weight)),
        *(nn.Tanh(), Halves(), nn.Linear(96, 32), nn.ReLU(inplace=True), nn.Linear(32, 10)),
    ]
    return nn.Sequential(*layers)


X, Y = torch.randn(26, 1, 8, 8), torch.randint(10, (26,))


def trained(pipe: Pipeline, model: nn.Module, x: Any = X, y: Any = Y) -> dict[str, Any]:
    """Losses, gradients, parameters and buffers after two steps, the second of a smaller mini-batch."""
    losses = [pipe.step(x, target=y)]
    losses.append(pipe.step(x[:11], target=y[:11]))
    found: dict[str, Any] = dict(plain.gradients(model))
    return {**found, **model.state_dict(), "losses": torch.stack(losses)}


@pytest.mark.parametrize(
    ("schedule", "chunks", "recompute", "offload", "strict"),
    [
        ("gpipe", 1, "never", "stash", False),
        ("1f1b", 1, ("never", "always", "never", "except-last"), ("stash", "never", "stash", "never"), True),
        ("zb-h1", 1, "never", "stash", True),
        ("interleaved-1f1b", 2, "never", ("stash", "never", "stash", "stash"), False),
        ("zb-v", 2, "never", "stash", False),
    ],
)
def test_the_numbers_are_those_without(
    schedule: str,
    chunks: int,
    recompute: Recompute | tuple[Recompute, ...],
    offload: Offload | tuple[Offload, ...],
    strict: bool,
):
    found = []
    for ours in ("never", offload):
        model = network()
        torch.manual_seed(1)
        options: dict[str, Any] = {
            "schedule": schedule,
            "chunks": chunks,
            "recompute": recompute,
            "strict": strict,
        }
        with cut_by_hand(
            model, [4, 9, 12], loss_fn=nn.CrossEntropyLoss(), micro_batches=8, offload=ours, **options
        ) as pipe:
            found.append(trained(pipe, model))
    plain.assert_same(*found)


@pytest.mark.parametrize("strict", [True])
def test_a_recorded_model_whose_values_go_past_stages(strict: bool):
    found = []
    offloads: Sequence[Offload] = ("never", "stash")
    for offload in offloads:
        torch.manual_seed(0)
        model, x, y = Hourglass(3), torch.randn(16, WIDTH), torch.randn(16, WIDTH)
        chain = chain_for(model, x, loss_fn=nn.MSELoss(), parts=8)
        plan = plan_by_hand([name for name, _ in chain.layers], [2, 4], micro_batches=8, offload=offload)
        with Pipeline(chain, plan, nn.MSELoss(), strict=strict) as pipe:  # type: ignore[arg-type]
            found.append(trained(pipe, model, x, y))
    plain.assert_same(*found)


def test_forward_and_backward_apart():
    """The caller's loss: all forwards run, then all backwards."""
    found = []
    for offload in ("never", "stash"):
        model = network()
        torch.manual_seed(1)
        with cut_by_hand(model, [4, 9], micro_batches=6, offload=offload) as pipe:
            for _ in range(2):
                nn.functional.cross_entropy(pipe(X), Y).backward()
            pipe(X)  # a graph that is dropped
            with torch.no_grad():
                output = pipe(X)
            found.append({**plain.gradients(model), "output": output})
    plain.assert_same(*found)


def chain(layers: int = 6, width: int = 64) -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())])


def one_gradient_waits(sender: nn.Module, receiver: nn.Module) -> None:
    """Let the backward of ``sender`` send a gradient when that of ``receiver`` has used the one before.

    How many wait at the receiver, in its memory, would depend on the times of the step.
    """
    used = threading.Semaphore(1)

    def wait(gradient: Tensor) -> None:
        assert used.acquire(timeout=60)

    def release(gradient: Tensor) -> None:
        used.release()

    sender.get_parameter("weight").register_hook(wait)
    receiver.get_parameter("weight").register_hook(release)


def test_a_device_holds_three_stashes_and_the_inputs_of_the_others():
    """Each stage saves the output of each Tanh; its first Linear saves the input, which stays."""
    peaks = {}
    rows, row = 16, 64 * 4
    for offload in ("never", "stash"):
        model = chain()
        one_gradient_waits(model[6], model[0])
        with cut_by_hand(
            model,
            [6],
            loss_fn=nn.MSELoss(),
            micro_batches=12,
            schedule="gpipe",
            offload=offload,
            strict=True,
        ) as pipe:
            for _ in range(2):
                pipe.step(torch.randn(12 * rows, 64), target=torch.randn(12 * rows, 64))
            peaks[offload] = pipe.memory()["virtual:0"].peak
            assert pipe.memory()["virtual:0"].by_category["other"] <= 100
    stash = 3 * rows * row  # besides the input
    assert peaks["never"] - peaks["stash"] == pytest.approx(9 * stash, rel=0.02)


def test_a_plan_that_only_offload_makes_fit_is_found_and_runs():
    x, y = torch.randn(12 * 16, 64), torch.randn(12 * 16, 64)
    where = Cluster.virtual(2, memory=340_000, threads=1, host_link="50GB/s")
    options: dict[str, Any] = {"schedule": "gpipe", "micro_batches": 12, "recompute": "never"}
    model = chain()
    with Pipeline.auto(
        model, x, target=y, loss_fn=nn.MSELoss(), devices=where, optimizer_state="sgd", strict=True, **options
    ) as pipe:
        assert "offload" in [stage.mode for stage in pipe.plan.stages]
        reference = plain.twin(model)
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 12)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


class Failing(nn.Module):
    """Fails at a given call of its forward or its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = [0, 0]
        self.fails: tuple[int, int] = (-1, -1)

    def forward(self, x: Tensor) -> Tensor:
        self.count(0)
        y = x * 1
        y.register_hook(lambda gradient: self.count(1))
        return y

    def count(self, which: int) -> None:
        self.calls[which] += 1
        if self.calls[which] == self.fails[which]:
            raise RuntimeError("on purpose")


@pytest.mark.parametrize(("fails", "strict"), [((6, -1), True), ((-1, 1), False), ((-1, 4), True)])
def test_a_failure_while_stashes_are_away_leaves_a_pipeline_that_works(fails: tuple[int, int], strict: bool):
    failing = Failing()
    before, behind = chain(2), chain(4)
    model = nn.Sequential(*before, failing, *behind)
    x, y = torch.randn(24, 64), torch.randn(24, 64)
    with cut_by_hand(
        model, [6], loss_fn=nn.MSELoss(), micro_batches=8, schedule="gpipe", offload="stash", strict=strict
    ) as pipe:
        failing.fails = fails
        with pytest.raises(RuntimeError, match="on purpose"):
            pipe.step(x, target=y)
        failing.fails = (-1, -1)
        pipe.zero_grad()
        loss = pipe.step(x, target=y)
        ours = plain.gradients(model)
    reference = plain.twin(model)
    reference.zero_grad()
    assert torch.equal(loss, plain.micro_batched_step(reference, x, y, nn.MSELoss(), 8))
    plain.assert_same(ours, plain.gradients(reference))


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


class Overwriting(nn.Module):
    """Writes into a tensor that its own backward needs."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        z = y * 2
        y.add_(1)
        return z


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_a_saved_tensor_that_was_overwritten_is_an_error_as_without(schedule: str):
    model = nn.Sequential(nn.Linear(4, 4), Overwriting(), nn.Linear(4, 4))
    with (
        cut_by_hand(
            model, [2], loss_fn=nn.MSELoss(), micro_batches=6, schedule=schedule, offload="stash"
        ) as pipe,
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
    ):
        pipe.step(torch.randn(12, 4), target=torch.randn(12, 4))


def test_hooks_of_the_caller_are_refused():
    with (
        cut_by_hand(
            chain(2), [2], loss_fn=nn.MSELoss(), schedule="gpipe", micro_batches=6, offload="stash"
        ) as pipe,
        save_on_cpu(),
        pytest.raises(RuntimeError, match=r"a stage of this plan offloads .* plan with offload='never'"),
    ):
        pipe.step(torch.randn(12, 64), target=torch.randn(12, 64))


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
    recompute = change.pop("recompute", None)
    if recompute:
        fields["stages"][0]["recompute"] = recompute
    with pytest.raises(ValueError, match=message):
        Plan.model_validate({**fields, **change})


def test_a_described_device_needs_the_bandwidth_to_its_host():
    fields: dict[str, Any] = plan_by_hand(["0", "1", "2"], [1], micro_batches=6, offload="stash").model_dump()
    for stage, name in zip(fields["stages"], ("device:0", "device:1"), strict=True):
        stage["device"] = name
    with pytest.raises(ValueError, match=r"'device:0' and its host is not known: .* host_link='25GB/s'"):
        Plan.model_validate({**fields, "cluster": Cluster.parse(["1GiB", "1GiB"])})
    Plan.model_validate({**fields, "cluster": Cluster.parse(["1GiB", "1GiB"], host_link="25GB/s")})
