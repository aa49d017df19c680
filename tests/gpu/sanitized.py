"""`python -m tests.gpu.sanitized [WAIT]`: schedules on one GPU under torch's stream sanitizer.

The sanitizer follows which stream has waited for which, and raises where a kernel reads or writes a tensor that another
stream may still use. It sees no memory of the host, so no wait for copies from there. It stays on for the rest of a
process, so this is a program. With the name of a wait, that wait is left out, and the program is to fail. It prints the
number of kernels that it looked at.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.cuda._sanitizer import CUDASanitizerDispatchMode

from pipepart.workers import modes
from pipepart.workers.streams import Wait, waits
from tests.gpu.late import CHUNKS, cut_late_chain, late_chain
from tests.support.plain import sample

DEVICES = ("cuda:0", "cuda:0")


class Sanitizer(CUDASanitizerDispatchMode):
    """Torch's sanitizer, for several threads at once."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0
        lock, look = threading.Lock(), self.event_handler._handle_kernel_launch

        def one_at_a_time(stream: int, *launch: Any) -> Any:
            operator = launch[3]
            if operator.name.startswith("aten::empty"):
                return []  # no kernel; an empty tensor goes by its id, which another one had before
            with lock:  # it counts kernels, and compares them by their number
                self.kernels += 1
                return look(stream, *launch)

        self.event_handler._handle_kernel_launch = one_at_a_time  # type: ignore


def on_all_workers(sanitizer: Sanitizer) -> None:
    """Let workers enter the sanitizer beside the caller's modes; a backward takes it over from its thread."""
    entered = modes.Modes.entered

    @contextmanager
    def and_sanitized(given: modes.Modes) -> Iterator[None]:
        with entered(given), sanitizer:
            yield

    modes.Modes.entered = and_sanitized  # type: ignore


def steps(sanitizer: Sanitizer, schedule: str, **options: Any) -> None:
    """Train for two steps, with what the caller does between them under the sanitizer too."""
    model = late_chain(len(DEVICES) * CHUNKS[schedule])
    with cut_late_chain(model, DEVICES, schedule, **options) as pipe:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            x, y = sample(32, 64)
            with sanitizer:
                x, y = x.cuda() * 1, y.pin_memory()
            pipe.step(x, target=y)
            with sanitizer:
                optimizer.step()
                optimizer.zero_grad()


def main() -> None:
    """Run all schedules, and one of them with recomputation and with offload."""
    if len(sys.argv) > 1:
        waits.left_out = frozenset({Wait[sys.argv[1]]})
    sanitizer = Sanitizer()
    on_all_workers(sanitizer)
    for schedule in CHUNKS:
        steps(sanitizer, schedule)
    steps(sanitizer, "1f1b", recompute="always")
    steps(sanitizer, "1f1b", offload="stash")
    torch.cuda.synchronize()
    sys.stdout.write(f"{sanitizer.kernels}\n")


if __name__ == "__main__":
    main()
