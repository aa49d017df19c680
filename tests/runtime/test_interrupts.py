"""Ctrl-C in a step: the caller gets it, nothing hangs, and the pipeline goes on."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import pipepart
from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.processes import run_script


def interrupted(work: Callable[[], object]) -> Iterator[KeyboardInterrupt]:
    """Do some work again and again, with an interrupt at each place of pipepart's code where Python raises one.

    That is where a function begins and where one that it has called returns.
    """
    own = str(Path(pipepart.__file__).parent)
    for place in range(10_000):
        passed = 0

        def profile(frame: FrameType, event: str, _: Any, place: int = place) -> None:
            nonlocal passed
            frames = (frame, frame.f_back) if event == "return" else (frame,)
            if event != "c_call" and any(one and one.f_code.co_filename.startswith(own) for one in frames):
                passed += 1
                if passed == place + 1:
                    raise KeyboardInterrupt

        try:
            sys.setprofile(profile)
            work()
        except KeyboardInterrupt as interrupt:
            sys.setprofile(None)
            yield interrupt
        else:
            if passed <= place:  # else Python has ignored it, as in the end of a generator that nobody holds
                return
        finally:
            sys.setprofile(None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("call", ["exclusively", "_evaluating", "step"])
def test_an_interrupt_at_any_call_restores_the_model_and_frees_the_pipeline(call):
    """Also while the traceback is held. The next step is right."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    reference = plain.twin(model)
    x, y = torch.randn(6, 4), torch.randn(6, 2)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 2)
    held: list[BaseException] = []
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss(), micro_batches=2) as pipe:
        engine: Any = pipe._engine
        calls: dict[str, Callable[[], object]] = {
            "exclusively": lambda: engine.exclusively(lambda: None),
            "_evaluating": lambda: pipe._evaluating(lambda: None),
            "step": lambda: pipe.step(x, target=y),
        }
        for interrupt in interrupted(calls[call]):
            held.append(interrupt)
            assert engine._claim is None
            assert all(module.training for module in model.modules())
            if call == "step":
                pipe.zero_grad()
                pipe.step(x, target=y)
                plain.assert_same(plain.gradients(model), plain.gradients(reference))
                pipe.zero_grad()
    assert len(held) > 5


def test_an_interrupt_within_no_grad_leaves_gradients_enabled():
    """Python raises it in torch's own code, between the call that disables gradients and the end of ``__enter__``."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    x, y = torch.randn(8, 4), torch.randn(8, 2)

    def interrupt(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_return" and function.__name__ == "_set_grad_enabled":
            sys.setprofile(None)
            raise KeyboardInterrupt

    with cut_by_hand(model, [1], loss_fn=nn.MSELoss(), micro_batches=2) as pipe:
        sys.setprofile(interrupt)
        with pytest.raises(KeyboardInterrupt):
            pipe.evaluate(x, target=y)
        assert torch.is_grad_enabled()
        pipe.step(x, target=y)


def test_a_second_interrupt_gives_up_a_layer_that_does_not_return():
    ended = run_script("""if True:
        import os, signal, threading, torch
        from torch import nn
        from tests.support.chains import cut_by_hand

        class Stuck(nn.Module):
            def forward(self, x):
                entered.set()
                never.wait()
                return x

        # A shell takes it from what it runs in the background.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        entered, never = threading.Event(), threading.Event()
        model = nn.Sequential(nn.Linear(4, 4), Stuck(), nn.Linear(4, 2))
        pipe = cut_by_hand(model, [1], loss_fn=nn.MSELoss())

        def interrupt_twice():
            entered.wait()
            for _ in range(2):
                threading.Event().wait(0.3)
                os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt_twice).start()
        try:
            pipe.step(torch.randn(6, 4), target=torch.randn(6, 2))
        except KeyboardInterrupt:
            print("interrupted")
        try:
            pipe.step(torch.randn(6, 4), target=torch.randn(6, 2))
        except RuntimeError as error:
            print(error)
    """)
    assert ended.stdout.splitlines() == [
        "interrupted",
        "the pipeline is closed: a layer did not return after an interrupt",
    ]
