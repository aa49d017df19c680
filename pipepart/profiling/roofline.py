"""Roofline: the compute and memory speed of a kind of device, which gives the time of operations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field

from ..document import Document
from ..input_error import InputError

_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_PARTS = re.compile(
    r"\s*(?P<device>[a-z]+)\s*:\s*(?P<flops>[0-9.]+)\s*(?P<order>[MGTP])FLOP/s"
    r"\s*,\s*(?P<bytes>[0-9.]+)\s*(?P<unit>[MGTP])B/s(\s*,\s*(?P<seconds>[0-9.]+)\s*us)?\s*"
)
_ORDERS = {"M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


class Work(NamedTuple):
    """Work of one operation: floating point operations of matrix products, and bytes read and written."""

    flops: float
    bytes: float


class Roofline(Document):
    """The speed of one kind of device.

    An operation takes ``max(flops / flops_per_second, bytes / bytes_per_second) + seconds_per_operation``: the roofline
    model of Williams, Waterman and Patterson (CACM 52(4), 2009) with a fixed cost.

    Attributes:
        kind: of the file.
        device: type of the device, as torch names it: ``"cuda"`` or ``"cpu"``.
        flops_per_second: speed that matrix products reach in the model's compute dtype, not the data sheet's peak.
        bytes_per_second: bandwidth that kernels reach between the device and its memory.
        seconds_per_operation: fixed time to start one operation.
    """

    kind: Literal["roofline"] = "roofline"
    device: str = Field(pattern="^[a-z]+$")
    flops_per_second: _Rate
    bytes_per_second: _Rate
    seconds_per_operation: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a text: device, speed of matrix products, bandwidth and, optionally, microseconds per operation.

        Raises:
            ValueError: the text does not have this form.

        >>> Roofline.parse("cuda: 156 TFLOP/s, 1.5 TB/s, 5 us").bytes_per_second
        1500000000000.0
        """
        match = _PARTS.fullmatch(text)
        try:
            if match:
                return cls(
                    device=match["device"],
                    flops_per_second=float(match["flops"]) * _ORDERS[match["order"]],
                    bytes_per_second=float(match["bytes"]) * _ORDERS[match["unit"]],
                    seconds_per_operation=float(match["seconds"] or 0) / 1e6,
                )
        except ValueError:
            pass
        raise InputError(
            f"{text!r} is not a roofline: write for example 'cuda: 156 TFLOP/s, 1.5 TB/s, 5 us', with speeds above 0"
        )

    def seconds(self, operations: Sequence[Work]) -> float:
        """Return the estimated seconds of operations that run one after the other."""
        return sum(
            max(work.flops / self.flops_per_second, work.bytes / self.bytes_per_second)
            + self.seconds_per_operation
            for work in operations
        )

    @property
    def note(self) -> str:
        """Note for the profile: times are estimates from this roofline."""
        return f"times are estimates for {self}; nothing was measured"

    def __str__(self) -> str:
        """Return a text that :meth:`parse` reads, with three significant digits."""
        rates = f"{_text(self.flops_per_second)}FLOP/s, {_text(self.bytes_per_second)}B/s"
        return f"{self.device}: {rates}, {self.seconds_per_operation * 1e6:.3g} us"


def _text(rate: float) -> str:
    order = next((order for order in "PTG" if rate >= _ORDERS[order]), "M")
    return f"{rate / _ORDERS[order]:.3g} {order}"
