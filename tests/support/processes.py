"""Runs scripts in processes of their own, forked from one that has imported torch, which takes seconds."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from typing import NamedTuple

# Receives scripts and forks a child for each. It starts no thread, and a child runs its script as the main program,
# so that it ends as any process of Python does.
_SERVER = """
import os, sys
from multiprocessing.connection import Connection
import torch, pipepart, tests.support.chains, tests.support.plain

def serve(requests):
    while True:
        try:
            script, out, err = requests.recv()
        except EOFError:
            sys.exit()
        child = os.fork()
        if child == 0:
            for stream, path in ((0, os.devnull), (1, out), (2, err)):
                os.dup2(os.open(path, os.O_RDWR), stream)
            return script
        requests.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

script = serve(Connection(int(sys.argv[1])))
exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
"""


class Ended(NamedTuple):
    """What a program printed, and its exit status."""

    returncode: int
    stdout: str
    stderr: str


class _Server(NamedTuple):
    process: subprocess.Popen[bytes]
    requests: Connection


@functools.cache
def _server() -> _Server:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _SERVER, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # so that it can be killed together with its child
        )
    return _Server(process, Connection(ours.detach()))


def run_script(script: str, *, timeout: float = 100) -> Ended:
    """Run a script as a program whose torch and pipepart are imported already.

    Raises:
        TimeoutError: The program did not end after ``timeout`` seconds, and was killed.
    """
    with tempfile.NamedTemporaryFile("r+") as out, tempfile.NamedTemporaryFile("r+") as err:
        server = _server()
        server.requests.send((script, out.name, err.name))
        if not server.requests.poll(timeout):
            os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait()
            _server.cache_clear()
            raise TimeoutError(f"no end after {timeout} s. It printed:\n{out.read()}\n{err.read()}")
        return Ended(server.requests.recv(), out.read(), err.read())
