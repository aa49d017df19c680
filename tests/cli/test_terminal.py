"""The program in a terminal, and in a pipe: width, colours, and where each text goes."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

import pipepart

COMMAND = [sys.executable, "-m", "pipepart", "simulate", "--schedule", "1f1b", "--devices", "4"]
COMMAND += ["--micro-batches", "32"]
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")
} | {"PYTHONPATH": str(Path(pipepart.__file__).parents[1]), "TERM": "xterm-256color"}


def in_terminal(columns: int, **more: str) -> str:
    """What the command prints in a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen(
        COMMAND, stdin=theirs, stdout=theirs, stderr=theirs, env=ENVIRONMENT | more, close_fds=True
    )
    os.close(theirs)
    printed = b""
    try:
        while block := os.read(ours, 65536):
            printed += block
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(ours)
    assert process.wait(timeout=60) == 0
    return printed.decode()


@pytest.mark.parametrize("columns", [60, 200])
def test_a_terminal_without_colours_is_filled_and_not_exceeded(columns: int) -> None:
    coloured = in_terminal(columns, NO_COLOR="1")
    assert not re.search(r"\x1b\[[\d;]*3\dm", coloured)
    printed = re.sub(r"\x1b\[[\d;]*m", "", coloured)  # bold and dim stay
    lengths = [len(line) for line in printed.splitlines()]
    assert max(lengths) <= columns
    picture = [line for line in printed.splitlines() if line.startswith("0 |")]
    assert max(map(len, picture)) == min(columns, 140)


def test_another_encoding_gets_plain_signs_in_their_columns() -> None:
    printed = [
        subprocess.run(COMMAND, capture_output=True, check=True, env=ENVIRONMENT | {"PYTHONIOENCODING": name})
        for name in ("ascii", "utf-8")
    ]
    plain, signs = (each.stdout.decode("utf-8").splitlines() for each in printed)
    assert "?" not in "".join(plain)
    rows = [[line for line in text if line.startswith("device 0")] for text in (plain, signs)]
    assert len(rows[0]) == len(rows[1]) == 1
    assert "#" in rows[0][0]


def test_a_terminal_has_colours_and_a_pipe_has_none() -> None:
    assert "\x1b[36m" in in_terminal(100)
    piped = subprocess.run(COMMAND, capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert "\x1b" not in piped.stdout
    assert not piped.stderr
    assert "Simulation" in piped.stdout
