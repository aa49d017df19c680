"""Threads that belong to devices: bound before they are handed out, and the memory that they keep."""

import threading

import pytest
import torch

from pipepart.workers import process_settings, worker
from pipepart.workers.worker import start_workers

pytestmark = pytest.mark.usefixtures("collected")


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("pipepart-")]


def test_a_device_that_cannot_be_bound_is_told_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device, threads: int | None) -> None:
        if threads == 7:
            raise RuntimeError("no such device")

    monkeypatch.setattr(worker, "_bind", refuse)
    threads = torch.get_num_threads()
    cpu = torch.device("cpu")
    with pytest.raises(RuntimeError, match="no such device"):
        start_workers([("good", cpu, 1), ("bad", cpu, 7)])
    for thread in threading.enumerate():
        if thread.name in ("pipepart-good", "pipepart-bad"):
            thread.join(30)
    assert not {"pipepart-good", "pipepart-bad"} & set(_threads())
    assert torch.get_num_threads() == threads


class Library:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []
        self.trimmed_after: list[int] = []

    def mallopt(self, parameter: int, value: int) -> None:
        self.told.append((parameter, value))

    def malloc_trim(self, pad: int) -> None:
        self.trimmed_after.append(len(self.told))


def test_freed_memory_is_kept_while_a_worker_of_the_cpu_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    library, kept = Library(), process_settings._KeptMemory()
    monkeypatch.setattr(kept, "_library", library)
    monkeypatch.setattr(worker, "kept_memory", kept)
    workers = start_workers([(str(number), torch.device("cpu"), 1) for number in range(2)])
    workers[0].stop()
    workers[0].join()
    assert [parameter for parameter, *_ in library.told] == [-3, -1, -2]
    assert dict(library.told)[-1] == 2**31 - 1
    workers[1].stop()
    workers[1].join()
    assert library.told[3:] == [(-3, 2**25), (-1, 2**26), (-2, 2**17)]
    assert library.trimmed_after == [6]


def test_settings_of_the_users_own_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "100000")
    assert process_settings._glibc() is None
