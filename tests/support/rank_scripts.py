"""Runs a script as several ranks, each the main program of a process, and keeps what they print and when they end.

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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

# Receives a script and a number of ranks, and forks them. A child ends as any process of Python does.
_SERVER = """
import os, socket, sys, time
from multiprocessing.connection import Connection
import torch, torch.distributed, pipepart, tests.support.chains
import torch._dynamo  # which the first optimizer imports, for seconds

def ranks(requests):
    while True:
        try:
            script, size, folder = requests.recv()
        except EOFError:
            sys.exit()
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        children = {}
        for rank in range(size):
            child = os.fork()
            if child == 0:
                os.setpgid(0, 0)
                environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
                os.environ |= {name: str(value) for name, value in environment.items()}
                out = os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT)
                for stream, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, out), (2, out)):
                    os.dup2(file, stream)
                os.environ["SCRATCH"] = folder
                return script
            children[child] = rank
        requests.send(list(children))
        while children:
            child, status = os.waitpid(-1, 0)
            if child in children:
                requests.send((children.pop(child), os.waitstatus_to_exitcode(status), time.time()))

script = ranks(Connection(int(sys.argv[1])))
exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
"""


class RankEnd(NamedTuple):
    """How a rank ended.

    Attributes:
        code: its exit status; None if it had to be killed.
        text: what it printed.
        seconds: from the failure of any rank, or from the start if there was none, to its end.
    """

    code: int | None
    text: str
    seconds: float


@functools.cache
def _server() -> Connection:
    ours, theirs = socket.socketpair()
    with theirs:
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _SERVER, str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
    return Connection(ours.detach())


def run_ranks(script: str, size: int, *, stays: int | None = None, seconds: float = 60) -> list[RankEnd]:
    """Run a script as each of ``size`` ranks; those that have not ended after ``seconds`` are killed.

    The rank ``stays`` does not end by itself, and is killed after the others.
    """
    server = _server()
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        server.send((script, size, folder))
        ids = server.recv()
        codes: dict[int, int | None] = {}
        ends: dict[int, float] = {}
        while len(ends) < size:
            left = began + seconds - time.time() if set(range(size)) - ends.keys() != {stays} else 0
            if not server.poll(max(0.0, left)):
                for rank, process in enumerate(ids):
                    if rank not in ends:
                        codes[rank] = None
                        os.kill(process, signal.SIGKILL)
                stays, seconds = None, seconds + 60
                continue
            rank, code, end = server.recv()
            codes.setdefault(rank, code)
            ends[rank] = end
        texts = [Path(folder, str(rank)).read_text() for rank in range(size)]
    fails = [
        float(line.split()[-1]) for text in texts for line in text.splitlines() if line[:8] == "fails at"
    ]
    start = min(fails, default=began)
    return [RankEnd(codes[rank], texts[rank], ends[rank] - start) for rank in range(size)]
