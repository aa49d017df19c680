"""Layers on worker threads see what the calling thread has set; while they run, all threads take quick turns."""

import contextvars
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import BaseTorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.two_parts import Calls

X, Y = torch.linspace(-1, 1, 24).view(6, 4), torch.zeros(6, 4)
SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


def chain(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), *layers, nn.Linear(4, 4))


@contextmanager
def scaled() -> Iterator[None]:
    token = SCALE.set(3.0)
    try:
        yield
    finally:
        SCALE.reset(token)


# What a caller sets, how a layer sees it, and what it sees within and behind.
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[], Any], Any, Any]] = {
    "context variable": (scaled, SCALE.get, 3.0, 1.0),
    "default device": (lambda: torch.device("meta"), lambda: torch.empty(3).device.type, "meta", "cpu"),
    "cache of autocast": (
        lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
        torch.is_autocast_cache_enabled,
        False,
        True,
    ),
    "threads of autograd": (
        lambda: torch.autograd.set_multithreading_enabled(False),
        torch._C._is_multithreading_enabled,
        False,
        True,
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_layers_see_what_the_caller_has_set(name):
    context, look, within, behind = SETTINGS[name]
    seen: SimpleQueue[Any] = SimpleQueue()  # layers that share Python values need a profile

    def noting() -> nn.Module:
        return Calls(lambda x: (seen.put(look()), x * 1)[1])

    with cut_by_hand(chain(noting(), noting()), [2], loss_fn=nn.MSELoss()) as pipe:
        for expected in (within, behind):
            with context() if expected is within else nullcontext():
                pipe.step(X, target=Y)
            assert [seen.get_nowait() for _ in range(seen.qsize())] == [expected] * 6


@pytest.mark.parametrize("drop_in", [False, True])
def test_hooks_of_saved_tensors_see_what_layers_save(drop_in):
    threads: set[str] = set()

    def pack(tensor: Tensor) -> Any:
        threads.add(threading.current_thread().name)
        return tensor.clone()

    model = chain(nn.Tanh())
    reference = plain.twin(model)
    with cut_by_hand(model, [1, 2], loss_fn=nn.MSELoss()) as pipe:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            if drop_in:
                nn.functional.mse_loss(pipe(X), Y).backward()
            else:
                pipe.step(X, target=Y)
        assert {f"pipepart-virtual:{number}" for number in range(3)} <= threads
    plain.micro_batched_step(reference, X, Y, nn.MSELoss(), 3)
    plain.assert_close(plain.gradients(model), plain.gradients(reference), 1e-6)


@pytest.mark.parametrize("mode", [partial(FlopCounterMode, display=False), BaseTorchFunctionMode])
def test_modes_that_look_at_operations_are_refused_and_the_next_step_works(mode):
    model = chain()
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss()) as pipe:
        active = mode()
        with active, pytest.raises(RuntimeError, match=f"{type(active).__name__} is active on the calling"):
            pipe.step(X, target=Y)
        pipe.step(X, target=Y)


@pytest.fixture(autouse=True)
def _beside_another_thread():
    before, ends = sys.getswitchinterval(), threading.Event()
    other = threading.Thread(target=ends.wait)
    other.start()
    yield
    ends.set()
    other.join()
    sys.setswitchinterval(before)


def switch_intervals(sets: float | None = None) -> list[Any]:
    """Return those within each forward of a step, and behind it; a layer sets another one if told to."""
    seen: list[float] = []

    def note(x: Tensor) -> Tensor:
        seen.append(sys.getswitchinterval())
        if sets:
            sys.setswitchinterval(sets)
        return x

    model = nn.Sequential(nn.Linear(4, 4), Calls(note), nn.Linear(4, 4))
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss()) as pipe:
        pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))
    # To the microsecond, which is what the interpreter keeps.
    return [pytest.approx(seconds, abs=1.1e-6) for seconds in (*seen, sys.getswitchinterval())]


def test_the_interval_is_short_in_a_step_unless_the_user_sets_another_one() -> None:
    sys.setswitchinterval(0.0125)
    assert switch_intervals() == [2e-4, 2e-4, 2e-4, 0.0125]
    assert switch_intervals(sets=0.007) == [2e-4, 0.007, 0.007, 0.007]
    sys.setswitchinterval(1e-5)
    assert switch_intervals() == [1e-5] * 4


def test_workers_alone_keep_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hand over at each operation of torch anyway, and shorter turns cost a step of tiny layers 15 %."""
    threads, main = threading.enumerate, threading.main_thread()
    monkeypatch.setattr(
        threading,
        "enumerate",
        lambda: [one for one in threads() if one.name.startswith("pipe") or one is main],
    )
    sys.setswitchinterval(0.0125)
    assert switch_intervals() == [0.0125] * 4
