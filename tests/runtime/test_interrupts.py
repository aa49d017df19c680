"""Ctrl-C in a step: the caller gets it, nothing hangs, and the pipeline goes on."""

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import pipepart
from tests.support.chains import cut_by_hand
from tests.support.processes import run_script
from tests.support.seeds import seeds

pytestmark = pytest.mark.usefixtures("short_profiles")

PRELUDE = """
import faulthandler, os, signal, threading
import torch
from torch import nn
import pipepart
from tests.support import plain
from tests.support.chains import cut_by_hand

faulthandler.dump_traceback_later(300, exit=True)
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell takes from what it runs in the background
torch.manual_seed(0)
torch.set_num_threads(1)


class Interrupt(nn.Module):
    '''Sends the process a SIGINT in the forward or the backward of one call, and waits until it has arrived.'''

    def __init__(self):
        super().__init__()
        self.calls, self.at, self.where = 0, None, "forward"

    def forward(self, x):
        call, self.calls = self.calls, self.calls + 1
        y = x * 1
        if self.where == "forward":
            self.maybe(call)
        else:
            y.register_hook(lambda gradient: self.maybe(call))
        return y

    def maybe(self, call):
        if call == self.at:
            os.kill(os.getpid(), signal.SIGINT)


def network():
    return nn.Sequential(nn.Linear(4, 4), Interrupt(), nn.Linear(4, 4), nn.Tanh(), Interrupt(), nn.Linear(4, 2))
"""


def run(script: str) -> str:
    """Runs the script in a process of its own; what it printed."""
    done = run_script(PRELUDE + textwrap.dedent(script))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_interrupt_at_any_layer_reaches_the_caller_and_the_next_step_is_right():
    """In the forward and backward of each stage, in the first and a later micro-batch, under each schedule."""
    printed = run("""
        for schedule in ("1f1b", "gpipe"):
            model = network()
            x, y = torch.randn(8, 4), torch.randn(8, 2)
            with cut_by_hand(model, [2, 4], loss_fn=nn.MSELoss(), micro_batches=4, schedule=schedule) as pipe:
                for position in (1, 4):
                    for where in ("forward", "backward"):
                        for call in (0, 2):
                            layer = model[position]
                            layer.calls, layer.at, layer.where = 0, call, where
                            try:
                                pipe.step(x, target=y)
                                print("no interrupt")
                            except KeyboardInterrupt:
                                print("interrupt")
                            layer.at = None
                            reference = plain.twin(model)
                            pipe.zero_grad()
                            pipe.step(x, target=y)
                            plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
                            plain.assert_same(plain.gradients(model), plain.gradients(reference))
        print(sorted(thread.name for thread in threading.enumerate()))
    """)
    assert printed.splitlines() == ["interrupt"] * 16 + ["['MainThread']"]


@pytest.mark.parametrize("count", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_interrupts_at_many_instants_of_training(count):
    """Raised wherever the main thread is: no lock stays taken, every later step is right."""
    (seed,) = seeds(1, "interrupts")
    printed = run(f"""
        import random
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        model = network()
        x, y = torch.randn(8, 4), torch.randn(8, 2)
        reference = plain.twin(model)
        plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
        random.seed({seed if count > 20 else 0})
        interrupts = 0
        with cut_by_hand(model, [2, 4], loss_fn=nn.MSELoss(), micro_batches=4) as pipe:
            for _ in range({count}):
                try:  # the timer is within: on a busy machine it has expired by the next line
                    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 6e-3))
                    while True:
                        pipe.step(x, target=y)
                except KeyboardInterrupt:
                    interrupts += 1
                pipe.zero_grad()
                pipe.step(x, target=y)
                plain.assert_same(plain.gradients(model), plain.gradients(reference))
        print(interrupts, len(threading.enumerate()))
    """)
    assert printed.split() == [str(count), "1"]


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
            return
        finally:
            sys.setprofile(None)


@pytest.mark.parametrize("call", ["exclusively", "_evaluating"])
def test_an_interrupt_at_any_call_restores_the_model_and_frees_the_pipeline(call):
    """Also while the traceback is held."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    held: list[BaseException] = []
    with cut_by_hand(model, [1]) as pipe:
        engine: Any = pipe._engine
        function = getattr(engine if call == "exclusively" else pipe, call)
        for interrupt in interrupted(lambda: function(lambda: None)):
            held.append(interrupt)
            assert engine._claim is None
            assert all(module.training for module in model.modules())
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
        for call in (pipe.step, pipe.evaluate):
            sys.setprofile(interrupt)
            with pytest.raises(KeyboardInterrupt):
                call(x, target=y)
            assert torch.is_grad_enabled()
            pipe.step(x, target=y)


def test_a_second_interrupt_gives_up_a_layer_that_does_not_return():
    printed = run("""
        class Stuck(nn.Module):
            def forward(self, x):
                entered.set()
                never.wait()
                return x

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
    assert printed.splitlines() == [
        "interrupted",
        "the pipeline is closed: a layer did not return after an interrupt",
    ]
