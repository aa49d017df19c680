"""A thread that belongs to one device for as long as the pipeline lives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

Job = Callable[[], None]
Jobs = SimpleQueue[tuple[Job, Job | None] | None]


class Worker:
    """Runs jobs one after the other on its own thread, bound to one device.

    Jobs must not raise. The thread holds its queue and nothing of the pipeline, so that a pipeline nobody holds any
    more can be collected and its workers told to stop.
    """

    def __init__(self, name: str, device: torch.device, threads: int | None) -> None:
        self._jobs: Jobs = SimpleQueue()
        self._thread = threading.Thread(
            target=_work, args=(self._jobs, device, threads), name=f"pipepart-{name}", daemon=True
        )
        self._thread.start()

    def submit(self, job: Job, then: Job | None = None) -> None:
        """Has ``job`` run when all before it are done, and ``then`` when the thread holds nothing of it any more."""
        self._jobs.put((job, then))

    def stop(self) -> None:
        """Ends the thread when its jobs are done."""
        self._jobs.put(None)

    def join(self, seconds: float | None = None) -> bool:
        """Waits for the thread's end, for some seconds or any number; returns whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def ident(self) -> int | None:
        """The thread's number, as of ``threading.get_ident``."""
        return self._thread.ident


def _work(jobs: Jobs, device: torch.device, threads: int | None) -> None:
    if threads is not None:
        # A thread takes over the process's number when it first asks for it: so ask, and set its own behind that.
        torch.get_num_threads()
        torch.set_num_threads(threads)
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device)
    while (given := jobs.get()) is not None:
        job, then = given
        del given
        try:
            job()
        finally:
            del job
            if then is not None:
                then()


def start_workers(devices: Sequence[tuple[str, torch.device, int | None]]) -> list[Worker]:
    """One worker for each (name, torch device, intra-operation threads).

    ``torch.set_num_threads`` binds the calling thread and sets what threads started later get, so the caller's
    number is put back once every worker has set its own.
    """
    before = torch.get_num_threads()
    workers = [Worker(*device) for device in devices]
    ready: SimpleQueue[None] = SimpleQueue()
    for worker in workers:
        worker.submit(lambda: ready.put(None))
    for _ in workers:
        ready.get()
    torch.set_num_threads(before)
    return workers
