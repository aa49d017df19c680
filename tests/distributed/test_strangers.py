"""Whatever connects to rank 0 while the ranks come together, it neither ends nor delays their start."""

import json
import socket
import threading
import time

import pytest

from pipepart.ranks import contact


class Store:
    """Has the address of rank 0."""

    def __init__(self) -> None:
        self.address: dict = {}
        self.there = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.address = json.loads(value)
        self.there.set()


class Start:
    """Rank 0, which waits for rank 1 on another thread."""

    def __init__(self, seconds: float) -> None:
        self.store = Store()
        self.outcome: object = None
        self._thread = threading.Thread(target=self._run, args=(time.monotonic() + seconds,))
        self._thread.start()
        assert self.store.there.wait(10)

    def _run(self, end: float) -> None:
        try:
            self.outcome = contact._accepted(2, self.store, lambda: None, end)[0]
        except BaseException as error:
            self.outcome = error

    def connect(self, line: bytes) -> socket.socket:
        one = socket.create_connection(("127.0.0.1", self.store.address["port"]))
        one.sendall(line)
        return one

    def hello(self, rank: object) -> bytes:
        return json.dumps({"rank": rank, "token": self.store.address["token"]}).encode() + b"\n"

    def end(self) -> object:
        self._thread.join(20)
        return self.outcome


LINES = [
    b"[]\n",
    b"1\n",
    b"null\n",
    b'{"token": 5}\n',
    '{"token": "é"}\n'.encode(),
    b"\xff\n",
    b"[" * 1000 + b"\n",
]


def test_a_stranger_does_not_end_the_start():
    start = Start(10)
    wrong = [start.hello(rank) for rank in (0, 2, "x", True, None)]
    strangers = [start.connect(line) for line in [*LINES, *wrong]]
    with start.connect(start.hello(1)) as rank:
        found = start.end()
        assert isinstance(found, dict), found
        assert list(found) == [1]
        assert rank.recv(100).strip().decode() == start.store.address["answer"]
        found[1].close()
    for one in strangers:
        one.close()


@pytest.mark.parametrize("sent", [b"x", b"x" * 4000], ids=["byte by byte", "a line without an end"])
def test_a_stranger_does_not_delay_the_start(sent: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(contact, "_HELLO_SECONDS", 0.2)
    start = Start(0.1)
    began = time.monotonic()
    with start.connect(sent) as one:
        while start.outcome is None and time.monotonic() < began + 2:
            time.sleep(0.05)
            try:
                one.sendall(b"x")
            except OSError:
                break
        assert isinstance(start.end(), TimeoutError)
    assert time.monotonic() - began < 1
