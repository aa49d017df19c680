"""Runs a function in several processes of torch.distributed at once, as torchrun does, and compares with one process.

The processes live as long as the tests: a function that is called in them takes no time to start. They are forked from
a process that has imported torch.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.utils import _pytree as pytree

_PRELOADED = [
    *("torch", "torch.distributed", "pipepart"),
    "torch._dynamo",  # which the first optimizer of a process imports, for seconds
    *("pytest", "tests.distributed.test_as_in_one_process"),  # which imports what most cases need
]
_SECONDS = 500.0  # for the ranks to run one function, on a busy machine too


class Own(dict[str, Any]):
    """Results by name that a rank has for its own part of the model only."""


class Failed(NamedTuple):
    """What a rank raised."""

    error: BaseException
    traceback: str


class Team:
    """Processes with the environment that torchrun gives to those of one node."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self.size = size
        # As torchrun's agent does: the store is here, so a free port is one that is bound already.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ends: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, self._store.port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = _SECONDS) -> list[Any]:
        """Call a function of a module on every rank; return what it returns, by rank.

        Raises:
            AssertionError: it raises on any rank, with all tracebacks.
        """
        found = self.outcomes(function, *args, seconds=seconds)
        failed = [
            f"rank {rank}:\n{one.traceback}" for rank, one in enumerate(found) if isinstance(one, Failed)
        ]
        if failed:
            raise AssertionError("\n".join(failed))
        return found

    def outcomes(self, function: Callable[..., Any], *args: Any, seconds: float = _SECONDS) -> list[Any]:
        """As :meth:`run`, with a :class:`Failed` for each rank that raises.

        Raises:
            TimeoutError: a rank did not return in time; all were killed.
            EOFError: a rank has died; all were killed.
        """
        for end in self._ends:
            end.send_bytes(pickle.dumps((function, args)))
        left, end_time = dict(enumerate(self._ends)), time.monotonic() + seconds
        found: list[Any] = [None] * self.size
        while left:
            ready = wait(list(left.values()), max(end_time - time.monotonic(), 0))
            if not ready:
                self.kill()
                raise TimeoutError(f"ranks {sorted(left)} did not return after {seconds} s from {function}")
            for rank in [rank for rank, end in left.items() if end in ready]:
                try:
                    found[rank] = pickle.loads(left.pop(rank).recv_bytes())
                except EOFError:
                    self.kill()
                    raise EOFError(f"rank {rank} has died in {function}") from None
        return found

    def kill(self) -> None:
        ranks.cache_clear()
        for process in self.processes:
            process.kill()
            process.join()


@functools.cache
def ranks(size: int) -> Team:
    """Return a team that all tests use."""
    return Team(size)


def assert_as_in_one_process(case: Callable[..., Mapping[str, Any]], size: int, *args: Any) -> None:
    """A function of a module returns the same bits on every rank as in one process.

    Of :class:`Own` results each rank has a part, and all ranks together the whole.
    """
    found = ranks(size).run(case, *args)
    expected = _called(case, args)
    for key, value in expected.items():
        for rank, one in enumerate(found):
            wanted = {name: value[name] for name in one[key]} if isinstance(value, Own) else value
            own = dict(one[key]) if isinstance(value, Own) else one[key]
            assert_same_bits(own, wanted, f"{key} on rank {rank}")
        if isinstance(value, Own):
            assert {name for one in found for name in one[key]} == value.keys(), key


def assert_same_bits(found: Any, expected: Any, what: str) -> None:
    """Nests of tensors and plain values are equal, to the bit; dicts in any order."""
    ours, theirs = (
        {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(nest)[0]}
        for nest in (found, expected)
    )
    assert ours.keys() == theirs.keys(), (what, ours.keys() ^ theirs.keys())
    for path, one in ours.items():
        other, place = theirs[path], what + path
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            assert (one.dtype, one.shape) == (other.dtype, other.shape), place
            pairs = zip(_bits(one), _bits(other), strict=True)
            assert all(a.equal(b) for a, b in pairs), f"{place}: {one} is not {other}"
        else:
            assert one == other, place


def _bits(tensor: Tensor) -> Iterator[Tensor]:
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        yield tensor.indices()
        tensor = tensor.values()
    yield tensor.contiguous().view(-1).view(torch.uint8)


def _called(function: Callable[..., Any], args: Any) -> Any:
    torch.manual_seed(0)
    return function(*args)


def _serve(rank: int, size: int, port: int, requests: Connection) -> None:
    """Run what is sent until the tests end."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
    }
    torch.set_num_threads(1)
    while True:
        try:
            request = requests.recv_bytes()
        except EOFError:
            os._exit(0)
        try:
            answer = _called(*pickle.loads(request))
        except BaseException as error:
            answer = Failed(error, traceback.format_exc())
        requests.send_bytes(_pickled(answer))


def _pickled(answer: Any) -> bytes:
    try:
        return pickle.dumps(answer)
    except Exception as error:  # an exception that has no pickled form
        what = getattr(answer, "traceback", repr(answer))
        return pickle.dumps(Failed(TypeError(f"{what} cannot be sent: {error}"), what))
