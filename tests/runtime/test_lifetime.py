"""Workers live as long as their pipeline, and nothing of a step lives longer than it."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest
import torch
from torch import Tensor, nn

import pipepart
from tests.support.chains import cut_by_hand

pytestmark = pytest.mark.usefixtures("collected", "short_profiles")


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("pipepart-")]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


X, Y = torch.ones(6, 4), torch.zeros(6, 2)


class Tag:
    """Something to hold weakly: an attribute of a tensor's memory."""


def tagged(tensor: Tensor) -> tuple[Tensor, weakref.ref[Tag]]:
    tag = Tag()
    tensor.untyped_storage().tag = tag  # type: ignore[attr-defined]
    return tensor, weakref.ref(tag)


def test_closing_twice_does_nothing_and_use_after_it_is_refused():
    pipe = cut_by_hand(network(), [1], loss_fn=nn.MSELoss())
    output = pipe(X)
    pipe.close()
    pipe.close()
    for use in (lambda: pipe.step(X, target=Y), lambda: pipe(X), lambda: output.sum().backward()):
        with pytest.raises(RuntimeError, match="closed"):
            use()
    assert "closed" in repr(pipe)


def test_a_with_block_closes_even_when_it_fails():
    def fail() -> None:
        with cut_by_hand(network(), [1], loss_fn=nn.MSELoss()) as pipe:
            pipe.step(X, target=Y)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert workers() == []


@pytest.mark.parametrize("use", ["none", "step", "forward", "failure"])
def test_an_unclosed_pipeline_that_nobody_holds_ends_its_workers_and_frees_the_model(use, recwarn):
    class Fail(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("on purpose")

    model = nn.Sequential(*network(), Fail()) if use == "failure" else network()
    pipe = cut_by_hand(model, [1], loss_fn=nn.MSELoss())
    threads = workers()
    assert len(threads) == 2
    if use == "step":
        pipe.step(X, target=Y)
    elif use == "forward":
        pipe(X).sum().backward()
    elif use == "failure":
        with pytest.raises(ValueError, match="on purpose"):
            pipe.step(X, target=Y)
    alive = weakref.ref(model)
    del pipe, model
    gc.collect()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert alive() is None
    assert not [warning for warning in recwarn if issubclass(warning.category, ResourceWarning)]


def test_a_pipeline_that_cannot_be_made_leaves_no_worker():
    with pytest.raises(ValueError, match="reduction='none'"):
        cut_by_hand(network(), [1], loss_fn=nn.MSELoss(reduction="none"))
    shared = nn.BatchNorm1d(4)
    with pytest.raises(ValueError, match="share"):
        cut_by_hand(nn.Sequential(shared, shared), [1])
    assert workers() == []


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_step_keeps_nothing_of_its_mini_batch(schedule):
    """Without help of the garbage collector: a training loop must not gather mini-batches."""
    with cut_by_hand(network(), [1], loss_fn=nn.MSELoss(), schedule=schedule) as pipe:
        pipe.step(X, target=Y)
        gc.collect()
        gc.disable()
        try:
            x, input_alive = tagged(torch.randn(6, 4))
            y, target_alive = tagged(torch.randn(6, 2))
            pipe.step(x, target=y)
            del x, y
            assert input_alive() is None
            assert target_alive() is None
        finally:
            gc.enable()


def test_a_forward_keeps_nothing_once_its_output_is_gone():
    with cut_by_hand(network(), [1]) as pipe:
        pipe(X)
        gc.collect()
        gc.disable()
        try:
            x, alive = tagged(torch.randn(6, 4))
            output = pipe(x)
            output.sum().backward()
            del x, output
            assert alive() is None
        finally:
            gc.enable()


@pytest.mark.parametrize(
    ("schedule", "recompute", "drop_in", "most"),
    [
        ("sequential", "never", False, (1, 1, 1)),
        ("1f1b", "never", False, (3, 2, 1)),
        ("gpipe", "never", True, (6, 6, 6)),
        ("gpipe", "except-last", False, (2, 2, 2)),
        ("gpipe", "always", False, (1, 1, 1)),
        ("gpipe", "always", True, (1, 1, 1)),
    ],
)
def test_activations_are_released_as_soon_as_the_schedule_allows(schedule, recompute, drop_in, most):
    """Counted at each forward and backward of six micro-batches: only what the backward is at, and what is kept."""

    class Watch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[weakref.ref[Tag]] = []
            self.alive: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            self.count()
            y, tag = tagged(x.exp())
            self.seen.append(tag)
            y.register_hook(lambda gradient: self.count())
            return y * 1

        def count(self) -> None:
            self.alive.append(sum(tag() is not None for tag in self.seen))

    watches = [Watch() for _ in range(3)]
    layers = [layer for watch in watches for layer in (nn.Linear(4, 4), watch)]
    options = {"micro_batches": 6, "schedule": schedule, "recompute": recompute}
    gc.collect()
    gc.disable()
    try:
        with cut_by_hand(nn.Sequential(*layers), [2, 4], loss_fn=nn.MSELoss(), **options) as pipe:
            if drop_in:
                pipe(torch.ones(6, 4)).sum().backward()
            else:
                pipe.step(torch.ones(6, 4), target=torch.zeros(6, 4))
    finally:
        gc.enable()
    for watch, peak in zip(watches, most, strict=True):
        assert max(watch.alive) == peak
        # Each backward is counted once, and so is each forward.
        assert len(watch.alive) - 6 == {"never": 6, "except-last": 11, "always": 12}[recompute]
        assert sum(tag() is not None for tag in watch.seen) == 0


def test_intra_operation_threads_of_the_caller_and_of_later_threads_stay():
    def in_a_new_thread() -> int:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.get_num_threads).result()

    torch.set_num_threads(2)
    cluster = pipepart.Cluster.virtual(2, threads=1)
    assert torch.get_num_threads() == 2
    profile = pipepart.profile(network(), X, micro_batches=2, seconds=0.01, threads=1)
    with pipepart.Pipeline(network(), pipepart.plan(profile, cluster), loss_fn=nn.MSELoss()) as pipe:
        assert torch.get_num_threads() == in_a_new_thread() == 2
        pipe.step(X, target=Y)
    assert torch.get_num_threads() == in_a_new_thread() == 2


def test_each_worker_has_the_threads_of_its_device():
    class Ask(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.put((threading.current_thread().name, torch.get_num_threads()))
            return x

    seen: SimpleQueue[tuple[str, int]] = SimpleQueue()  # layers that share Python values need a profile
    model = nn.Sequential(nn.Linear(4, 4), Ask(), nn.Linear(4, 4), Ask(), nn.Linear(4, 2))
    torch.set_num_threads(2)
    with cut_by_hand(model, [2], loss_fn=nn.MSELoss()) as pipe:
        pipe.step(X, target=Y)
    found = {seen.get_nowait() for _ in range(seen.qsize())}
    assert found == {("pipepart-virtual:0", 1), ("pipepart-virtual:1", 1)}


def test_stages_work_at_the_same_time():
    """Each of two stages waits within its layer for the other: one after the other they would never meet."""
    first, second = SimpleQueue[int](), SimpleQueue[int]()  # layers that share Python values need a profile

    class Meet(nn.Module):
        def __init__(self, call: int, mine: SimpleQueue[int], other: SimpleQueue[int]) -> None:
            super().__init__()
            self.calls, self.call, self.mine, self.other = 0, call, mine, other

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == self.call:
                self.mine.put(1)
                self.other.get(timeout=60)
            return x * 1

    meeting = Meet(2, first, second), Meet(1, second, first)
    model = nn.Sequential(nn.Linear(4, 4), meeting[0], nn.Linear(4, 4), meeting[1], nn.Linear(4, 2))
    with cut_by_hand(model, [2], loss_fn=nn.MSELoss(), micro_batches=3, schedule="gpipe") as pipe:
        pipe.step(X, target=Y)
    assert first.empty()
    assert second.empty()
