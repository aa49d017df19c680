"""Ctrl-C in a step: nothing hangs and the pipeline goes on. It cannot be forked, pickled or copied, and says so."""

import copy
import io
import pickle
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


PRELUDE = """
import multiprocessing, os, sys, threading
import torch
from torch import nn
from tests.support.chains import cut_by_hand

torch.manual_seed(0)
torch.set_num_threads(1)
X = torch.randn(6, 4)


def network():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def refused(use):
    try:
        use()
        print("it was done")
    except RuntimeError as error:
        print("threads do not survive a fork: make the pipeline in this process" in str(error))
"""


def run(script: str) -> list[str]:
    """Runs the script in a process of its own; the lines that it printed, and nothing on the error stream."""
    done = run_script(PRELUDE + textwrap.dedent(script), timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.split()


def test_in_a_forked_child_every_use_is_refused_and_its_end_does_not_hang():
    printed = run("""
        pipe = cut_by_hand(network(), [2], loss_fn=nn.MSELoss())
        output = pipe(X)
        child = os.fork()
        if child == 0:
            refused(lambda: pipe.step(X, target=X))
            refused(lambda: pipe(X))
            refused(lambda: output.sum().backward())
            pipe.close()
            del pipe
            sys.exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        print(float(pipe.step(X, target=X)) > 0)  # the parent's goes on, and ends with it open
    """)
    assert sorted(printed) == sorted(["True"] * 4 + ["0"])


def test_a_fork_while_another_thread_is_in_a_step():
    """The claim and the locks of the step belong to a thread that the child has not."""
    printed = run("""
        inside, leave = threading.Event(), threading.Event()

        class Wait(nn.Module):
            def forward(self, x):
                inside.set()
                leave.wait(60)
                return x * 1

        pipe = cut_by_hand(nn.Sequential(nn.Linear(4, 4), Wait(), nn.Linear(4, 4)), [2], loss_fn=nn.MSELoss())
        other = threading.Thread(target=lambda: pipe.step(X, target=X))
        other.start()
        inside.wait(60)
        child = os.fork()
        if child == 0:
            refused(lambda: pipe.step(X, target=X))
            pipe.close()
            sys.stdout.flush()
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        leave.set()
        other.join(60)
        pipe.close()
    """)
    assert sorted(printed) == ["0", "True"]


@pytest.mark.parametrize(
    "use",
    [pickle.dumps, copy.copy, copy.deepcopy, lambda pipe: torch.save(pipe, io.BytesIO())],
    ids=["pickle", "copy", "deepcopy", "torch.save"],
)
def test_it_is_not_pickled_or_copied(use: Callable[[Any], object]):
    with (
        cut_by_hand(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1]) as pipe,
        pytest.raises(TypeError, match=r"pipepart\.save\(folder, .*\) and pipe\.plan\.save\(path\)"),
    ):
        use(pipe)
