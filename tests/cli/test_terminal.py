"""Output on a terminal fills its width without exceeding it, and respects its colour settings."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import termios
import threading

import pytest
from typer.testing import CliRunner

from pipepart.cli import app

LINE = ["simulate", "--schedule", "1f1b", "--devices", "4", "--micro-batches", "32"]


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def in_terminal(columns: int) -> str:
    """What the command prints if the three standard streams are a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    printed: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # how Linux says that the other end is closed
            while block := os.read(ours, 65536):
                printed.append(block)

    reader = threading.Thread(target=read)
    reader.start()
    saved = [os.dup(number) for number in range(3)]
    try:
        for number in range(3):
            os.dup2(theirs, number)
        with os.fdopen(theirs, "w", encoding="utf-8") as stream, contextlib.redirect_stdout(stream):
            app(LINE, standalone_mode=False)
    finally:
        for number, kept in enumerate(saved):
            os.dup2(kept, number)
            os.close(kept)
        reader.join(timeout=60)
        os.close(ours)
    return b"".join(printed).decode()


@pytest.mark.parametrize("columns", [60, 200])
def test_a_terminal_without_colours_is_filled_and_not_exceeded(columns, monkeypatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    shown = in_terminal(columns)
    assert not re.search(r"\x1b\[[\d;]*3\dm", shown)
    lines = re.sub(r"\x1b\[[\d;]*m", "", shown).splitlines()  # bold and dim stay
    assert max(map(len, lines)) <= columns
    assert max(len(line) for line in lines if line.startswith("0 |")) == min(columns, 140)


def test_a_terminal_has_colours_and_a_pipe_has_none() -> None:
    assert "\x1b[36m" in in_terminal(100)
    piped = CliRunner().invoke(app, LINE)
    assert "\x1b" not in piped.stdout
    assert not piped.stderr
    assert "Simulation" in piped.stdout
