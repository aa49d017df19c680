"""Call: the arguments of one pipeline call. Agreed: the values that processes have agreed on before it runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from ..data.split import MicroBatches


class Call(NamedTuple):
    """A call of a pipeline in this process.

    Attributes:
        name: of the method.
        args, kwargs, target: its arguments; none on a rank that was given no mini-batch.
        make: splits them into micro-batches.
        options: further arguments of the method, as text; the same on all ranks.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    make: Callable[[tuple[Any, ...], dict[str, Any], Any], MicroBatches]
    options: str = ""

    def split(self) -> MicroBatches:
        """Return the micro-batches."""
        return self.make(self.args, self.kwargs, self.target)


class Agreed(NamedTuple):
    """What all processes know before a call runs. One process alone knows the micro-batches, and needs no more.

    Attributes:
        batch: the micro-batches.
        form: equal for calls whose stages exchange equal messages.
        seed: of the random numbers; None for the caller's generator.
        number: of the call.
    """

    batch: MicroBatches
    form: Hashable = None
    seed: int | None = None
    number: int = 0
