"""Workers live as long as their pipeline, nothing of a step lives longer, and any thread may step or close it."""

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipepart import Pipeline
from pipepart.workers import process_settings, worker
from pipepart.workers.worker import start_workers
from tests.support.chains import cut_by_hand
from tests.support.in_backward import calls_in_backward
from tests.support.pieces import Fails
from tests.support.two_parts import Calls

pytestmark = pytest.mark.usefixtures("collected")


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("pipepart-")]


def network(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), *(layers or [nn.Tanh()]), nn.Linear(4, 2))


X, Y = torch.linspace(-1, 1, 24).view(6, 4), torch.zeros(6, 2)


def test_closing_twice_does_nothing_and_use_after_it_is_refused():
    pipe = cut_by_hand(network(), [1], loss_fn=nn.MSELoss())
    output = pipe(X)
    pipe.close()
    pipe.close()
    for use in (lambda: pipe.step(X, target=Y), lambda: pipe(X), lambda: output.sum().backward()):
        with pytest.raises(RuntimeError, match="closed"):
            use()
    assert "closed" in repr(pipe)


@pytest.mark.parametrize("use", ["none", "step", "forward", "failure"])
def test_an_unclosed_pipeline_that_nobody_holds_ends_its_workers_and_frees_the_model(use, recwarn):
    model = nn.Sequential(*network(), Fails()) if use == "failure" else network()
    pipe = cut_by_hand(model, [1], loss_fn=nn.MSELoss())
    threads = workers()
    assert len(threads) == 2
    if use == "step":
        pipe.step(X, target=Y)
    elif use == "forward":
        pipe(X).sum().backward()
    elif use == "failure":
        with pytest.raises(ArithmeticError):
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


@pytest.mark.parametrize("called", [False, True])
def test_nothing_keeps_a_mini_batch(called):
    """Without help of the garbage collector: a training loop must not gather mini-batches."""

    def step(x: Tensor, y: Tensor) -> None:
        if called:
            (pipe(x) - y).square().sum().backward()
        else:
            pipe.step(x, target=y)

    with cut_by_hand(network(), [1], loss_fn=nn.MSELoss()) as pipe:
        step(X, Y)
        gc.collect()
        gc.disable()
        try:
            x, y = torch.randn(6, 4), torch.randn(6, 2)
            alive = [weakref.ref(tensor.untyped_storage()) for tensor in (x, y)]
            step(x, y)
            del x, y
            assert [memory() for memory in alive] == [None, None]
        finally:
            gc.enable()


def test_each_worker_has_the_threads_of_its_device_and_all_others_keep_theirs():
    seen: SimpleQueue[tuple[str, int]] = SimpleQueue()  # layers that share Python values need a profile

    def asking() -> nn.Module:
        return Calls(lambda x: (seen.put((threading.current_thread().name, torch.get_num_threads())), x)[1])

    def in_a_new_thread() -> int:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.get_num_threads).result()

    torch.set_num_threads(2)
    with cut_by_hand(network(asking(), nn.Linear(4, 4), asking()), [2], loss_fn=nn.MSELoss()) as pipe:
        assert torch.get_num_threads() == in_a_new_thread() == 2
        pipe.step(X, target=Y)
    assert torch.get_num_threads() == in_a_new_thread() == 2
    found = {seen.get_nowait() for _ in range(seen.qsize())}
    assert found == {("pipepart-virtual:0", 1), ("pipepart-virtual:1", 1)}


@pytest.mark.parametrize("called", [False, True])
def test_steps_leave_as_many_objects_and_threads_as_before(called):
    """Of changing sizes, every tenth of which fails."""

    def train(number: int) -> None:
        x = torch.full((2 + number % 4, 4), torch.nan if number % 10 == 0 else 0.1)
        try:
            if called:
                pipe(x).square().mean().backward()
            else:
                pipe.step(x, target=torch.zeros(len(x), 2))
        except ArithmeticError:
            assert number % 10 == 0

    def refuse(x: Tensor) -> Tensor:
        if bool(x.isnan().any()):
            raise ArithmeticError
        return x * 1

    model = nn.Sequential(*network(), Calls(refuse))
    with cut_by_hand(model, [1, 2], loss_fn=nn.MSELoss(), schedule="zb-h1") as pipe:
        counts = []
        for number in range(1, 301):
            train(number)
            if number % 100 == 0:
                gc.collect()
                counts.append((len(gc.get_objects()), threading.active_count()))
    assert counts[2][0] <= counts[1][0] + 50
    assert counts[2][1] == counts[1][1]


def test_a_device_that_cannot_be_bound_is_told_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device, threads: int | None) -> None:
        if threads == 7:
            raise RuntimeError("no such device")

    monkeypatch.setattr(worker, "_bind", refuse)
    threads = torch.get_num_threads()
    cpu = torch.device("cpu")
    with pytest.raises(RuntimeError, match="no such device"):
        start_workers([("good", cpu, 1), ("bad", cpu, 7)])
    for thread in threading.enumerate():
        if thread.name in ("pipepart-good", "pipepart-bad"):
            thread.join(30)
    assert not {"pipepart-good", "pipepart-bad"} & {thread.name for thread in workers()}
    assert torch.get_num_threads() == threads


def test_settings_of_the_users_own_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "100000")
    assert process_settings._glibc() is None


def calling(where: str, call: Callable[[], object]) -> nn.Module:
    """A layer that calls something in its forward or its backward."""
    if where == "forward":
        return Calls(lambda x: (call(), x * 1)[1])
    return Calls(lambda x: calls_in_backward(x, call))


def cut(layer: nn.Module) -> Pipeline:
    return cut_by_hand(network(layer), [2], loss_fn=nn.MSELoss())


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_within_a_step(where):
    holder: list[Pipeline] = []
    with cut(calling(where, lambda: holder[0].step(X, target=Y))) as pipe:
        holder.append(pipe)
        # A backward runs where gradients are disabled, which is found first.
        reason = "busy" if where == "forward" else "gradients are disabled"
        for _ in range(2):
            with pytest.raises(RuntimeError, match=reason):
                pipe.step(X, target=Y)
        holder.clear()


def test_the_stages_are_for_one_thread_at_a_time():
    """Also for one that was told that they are free just before another took them, however often it asks."""
    with cut(nn.Identity()) as pipe, ThreadPoolExecutor(1) as pool:
        engine: Any = pipe._engine
        asks = [partial(pool.submit, engine.exclusively, int)] * 2
        errors = engine.exclusively(lambda: [ask().exception(60) for ask in asks])
        engine.exclusively(int)
    assert ["busy" in str(error) for error in errors] == [True, True]


def test_closing_while_another_thread_is_in_a_step_waits_for_it():
    inside, leave = threading.Event(), threading.Event()
    losses: list[Tensor] = []

    def wait() -> None:
        inside.set()
        assert leave.wait(60)

    pipe = cut(calling("forward", wait))
    stepping = threading.Thread(target=lambda: losses.append(pipe.step(X, target=Y)))
    stepping.start()
    assert inside.wait(60)
    closing = threading.Thread(target=pipe.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    with pytest.raises(RuntimeError, match="the pipeline is closed"):
        pipe.step(X, target=Y)
    leave.set()
    stepping.join(60)
    closing.join(60)
    assert not closing.is_alive()
    assert len(losses) == 1
    assert workers() == []


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_layer_that_closes_its_own_pipeline(where):
    """The step goes on to its end, and is the last."""
    holder: list[Pipeline] = []
    pipe = cut(calling(where, lambda: holder[0].close()))
    holder.append(pipe)
    threads = workers()
    assert bool(pipe.step(X, target=Y).isfinite())
    with pytest.raises(RuntimeError, match="the pipeline is closed"):
        pipe.step(X, target=Y)
    for thread in threads:
        thread.join(60)
    assert workers() == []
