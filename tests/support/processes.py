"""Runs a script as one program, or as several ranks, and keeps what they print and how they end.

The processes are forked from one that has imported torch, which takes seconds.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

# Receives a script with the environment of each child. A child runs it as the main program of a process group of its
# own, and ends as any process of Python does. The server starts no thread.
_SERVER = """
import os, socket, sys
from multiprocessing.connection import Connection
import torch, pipepart, tests.support.chains, tests.support.plain

def script_of_child(requests):
    while True:
        try:
            script, environments, folder = requests.recv()
        except EOFError:
            sys.exit()
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        children = {}
        for number, environment in enumerate(environments):
            child = os.fork()
            if child == 0:
                os.setpgid(0, 0)
                os.environ |= environment
                os.environ.setdefault("MASTER_PORT", str(port))
                out, err = (os.open(f"{folder}/{number}.{name}", os.O_WRONLY | os.O_CREAT) for name in ("out", "err"))
                for stream, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, out), (2, err)):
                    os.dup2(file, stream)
                return script
            children[child] = number
        requests.send(list(children))
        while children:
            child, status = os.waitpid(-1, 0)
            if child in children:
                requests.send((children.pop(child), os.waitstatus_to_exitcode(status)))

MODULES = sys.argv[2:]
for module in MODULES:
    __import__(module)
script = script_of_child(Connection(int(sys.argv[1])))
exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
"""


class Ended(NamedTuple):
    """What a process printed, and its exit status: None if it had to be killed."""

    returncode: int | None
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        return self.stdout + self.stderr


def run_script(script: str, *, timeout: float = 500) -> Ended:
    """Run a script as a program whose torch and pipepart are imported already."""
    (ended,) = _run(_server("torch.distributed", "torch._dynamo"), script, [{}], timeout)
    if ended.returncode is None:
        raise TimeoutError(f"no end after {timeout} s. It printed:\n{ended.stdout}\n{ended.stderr}")
    return ended


def run_ranks(script: str, size: int, *, stays: int | None = None, seconds: float = 300) -> list[Ended]:
    """Run a script as each of ``size`` ranks; those that have not ended after ``seconds`` are killed.

    The rank ``stays`` does not end by itself, and is killed after the others.
    """
    common = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    common |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    environments = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    # The first loss or optimizer of a process imports the second of them, for seconds.
    return _run(_server("torch.distributed", "torch._dynamo"), script, environments, seconds, stays)


def others_of(ends: Sequence[Ended], bad: int) -> list[str]:
    """Return what the ranks but one have printed, each of which has ended in time with an exception."""
    others = [end for rank, end in enumerate(ends) if rank != bad]
    for end in others:
        assert (end.returncode, "terminate called" in end.text) == (1, False), end.text
    return [end.text for end in others]


@functools.cache
def _server(*modules: str) -> Connection:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-W", "ignore", "-c", _SERVER, str(theirs.fileno()), *modules]
        subprocess.Popen(command, pass_fds=[theirs.fileno()])
    return Connection(ours.detach())


def _run(
    server: Connection,
    script: str,
    environments: Sequence[Mapping[str, str]],
    seconds: float,
    stays: int | None = None,
) -> list[Ended]:
    """Run a script once for each environment; kill those that have not ended in time, and ``stays`` at last."""
    everyone = set(range(len(environments)))
    with tempfile.TemporaryDirectory() as folder:
        server.send((script, list(environments), folder))
        groups = server.recv()  # once the server has imported all
        until = time.time() + seconds
        codes: dict[int, int | None] = {}
        running = set(everyone)
        while running:
            left = until - time.time() if running != {stays} else 0
            if not server.poll(max(0.0, left)):
                for number in running:
                    codes[number] = None
                    os.killpg(groups[number], signal.SIGKILL)
                stays, until = None, time.time() + 60
                continue
            number, code = server.recv()
            codes.setdefault(number, code)
            running.remove(number)

        def printed(number: int, name: str) -> str:
            return Path(folder, f"{number}.{name}").read_text()

        return [Ended(codes[one], printed(one, "out"), printed(one, "err")) for one in sorted(everyone)]
