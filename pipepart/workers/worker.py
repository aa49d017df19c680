"""Worker: the thread of one device, which lives as long as its pipeline."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from queue import SimpleQueue

import torch

from .process_settings import kept_memory

Job = Callable[[], None]
Jobs = SimpleQueue[tuple[Job, Job | None] | None]


class Worker:
    """Runs jobs one after the other on its own thread, bound to one device.

    Jobs handle their own errors: one that raises is reported by ``threading.excepthook``. The thread references its
    queue but not the pipeline, so an unreferenced pipeline is garbage collected, which stops its workers.
    """

    def __init__(self, name: str, device: torch.device, threads: int | None) -> None:
        self._jobs: Jobs = SimpleQueue()
        self._bound: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=_work,
            args=(self._jobs, self._bound, device, threads),
            name=f"pipepart-{name}",
            daemon=True,
        )
        self._thread.start()

    def wait_until_bound(self) -> None:
        """Wait until the thread is bound to its device.

        Raises:
            BaseException: the device cannot be used; the thread has ended.
        """
        if (error := self._bound.get()) is not None:
            raise error

    def submit(self, job: Job, then: Job | None = None) -> None:
        """Queue ``job``; ``then`` is called once the thread holds no reference to it any more."""
        self._jobs.put((job, then))

    def stop(self) -> None:
        """End the thread after its queued jobs."""
        self._jobs.put(None)

    def join(self, seconds: float | None = None) -> bool:
        """Wait for the end of the thread, at most ``seconds`` (None: no limit); return True if it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def ident(self) -> int | None:
        """The identifier of the thread, as from ``threading.get_ident``."""
        return self._thread.ident


def _bind(device: torch.device, threads: int | None) -> None:
    if threads is not None:
        # A thread takes over the process's number when it first asks for it: so ask, and set its own behind that.
        torch.get_num_threads()
        torch.set_num_threads(threads)
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device)


def _work(
    jobs: Jobs, bound: SimpleQueue[BaseException | None], device: torch.device, threads: int | None
) -> None:
    try:
        _bind(device, threads)
    except BaseException as error:
        bound.put(error)
        return
    bound.put(None)
    with kept_memory if device.type == "cpu" else nullcontext():
        while (item := jobs.get()) is not None:
            job, then = item
            del item
            try:
                job()
            except BaseException:  # the thread lives on: the next job would wait for ever
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
            finally:
                del job
                if then is not None:
                    then()
                del then  # an idle worker must not hold the step, and so the model


def start_workers(devices: Sequence[tuple[str, torch.device, int | None]]) -> list[Worker]:
    """Start one worker for each (name, torch device, intra-operation threads).

    ``torch.set_num_threads`` binds the calling thread and sets what threads started later get, so the caller's
    number is put back once every worker has set its own.

    Raises:
        BaseException: a thread cannot be bound to its device; all have ended or will.
    """
    before = torch.get_num_threads()
    workers = [Worker(*device) for device in devices]
    try:
        for worker in workers:
            worker.wait_until_bound()
    except BaseException:
        for worker in workers:
            worker.stop()
        raise
    finally:
        torch.set_num_threads(before)
    return workers
