"""Layers on worker threads see what the calling thread has set: context variables, devices, saved hooks, settings."""

import contextvars
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from tests.support import plain
from tests.support.chains import cut_by_hand

X, Y = torch.linspace(-1, 1, 24).view(6, 4), torch.zeros(6, 4)
SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * SCALE.get()


class Fresh(nn.Module):
    """Makes a tensor without a word about its device."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.made.append(torch.empty(3).device.type)
        return x * 1


def chain(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), *layers, nn.Linear(4, 4))


def test_context_variables_have_the_callers_values():
    with cut_by_hand(chain(Scaled()), [1, 2], loss_fn=nn.MSELoss()) as pipe:
        for value in (1.0, 3.0):
            token = SCALE.set(value)
            try:
                plain.check_step(pipe, X, Y, nn.MSELoss())
            finally:
                SCALE.reset(token)


@pytest.mark.parametrize("by_block", [False, True])
def test_tensors_are_made_on_the_callers_default_device(by_block):
    fresh = Fresh()
    with cut_by_hand(chain(fresh), [1, 2], loss_fn=nn.MSELoss()) as pipe:
        if by_block:
            with torch.device("meta"):
                pipe.step(X, target=Y)
        else:
            torch.set_default_device("meta")
            try:
                pipe.step(X, target=Y)
            finally:
                torch.set_default_device(None)
        assert fresh.made == ["meta"] * 3
        pipe.step(X, target=Y)
        assert fresh.made == ["meta"] * 3 + ["cpu"] * 3


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


class Seen(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [lambda: FlopCounterMode(display=False), Seen], ids=["flops", "function"])
def test_modes_that_look_at_operations_are_refused_and_the_next_step_works(mode):
    model = chain()
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss()) as pipe:
        active = mode()
        with active, pytest.raises(RuntimeError, match=f"{type(active).__name__} is active on the calling"):
            pipe.step(X, target=Y)
        pipe.step(X, target=Y)


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
    with cut_by_hand(chain(*looks), [2], loss_fn=nn.MSELoss()) as pipe:
        with (
            torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
            torch.autograd.set_multithreading_enabled(False),
        ):
            pipe.step(X, target=Y)
        assert [one.seen for one in looks] == [{(False, False)}] * 2
        with torch.autocast("cpu", torch.bfloat16):
            pipe.step(X, target=Y)
        assert [one.seen for one in looks] == [{(False, False), (True, True)}] * 2
