"""A pipeline cannot be carried into a forked process, pickled or copied, and says so instead of hanging."""

import copy
import io
import pickle
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.chains import cut_by_hand
from tests.support.processes import run_script

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
    printed = run(
        """
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
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        leave.set()
        other.join(60)
        pipe.close()
    """.replace("os._exit(0)", "sys.stdout.flush(); os._exit(0)")
    )
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
