"""One layer of a made-up planning problem."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """Costs of one layer of a problem; seconds are for one micro-batch."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 0.0
    parameters: int = 0
    trained: bool = True
    output: int = 0
    peak: int = 0
    saved: int = 0
    waiting: int = 0
    keeps_input: bool = False
    shares_with: tuple[int, ...] = ()
    split: float | None = None
