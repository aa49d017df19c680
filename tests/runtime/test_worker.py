"""Threads that belong to devices are bound before they are handed out, and settings of the user stay."""

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


def test_settings_of_the_users_own_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "100000")
    assert process_settings._glibc() is None
