"""What any stage of a profiled chain costs: the rows that the cut chooses from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..cluster import Link
from ..profiling import Profile
from .chain import Floats, Row


class ChainCosts:
    """Seconds and bytes of every run of layers ``[a, b)`` of a profile at one micro-batch size."""

    def __init__(self, profile: Profile, micro_batches: int, link: Link) -> None:
        costs = profile.at(micro_batches)
        self.micro_batches = micro_batches
        self.layers = len(costs.layers)
        self.forward = np.array([layer.forward.seconds for layer in costs.layers])
        self.backward_input = np.array([layer.backward_input.seconds for layer in costs.layers])
        self.backward_weight = np.array([layer.backward_weight.seconds for layer in costs.layers])
        self.forward[-1] += costs.loss.forward.seconds
        self.backward_input[-1] += costs.loss.backward_seconds
        self.static_bytes = np.array(
            [
                info.parameter_bytes + info.gradient_bytes + profile.optimizer_bytes(info)
                for info in profile.layers
            ]
        )
        self.output_bytes = np.array([layer.output_bytes for layer in costs.layers])
        self.peak_bytes = np.array([layer.peak_bytes for layer in costs.layers])
        # The gradient of a stage's output arrives before its backward starts; the last stage makes its own.
        self.arriving_bytes = np.r_[self.output_bytes[:-1], 0]
        self._pieces = costs.saved
        self.border_seconds = self._border_seconds(profile, link)

    @property
    def seconds(self) -> Floats:
        """Forward and backward of each layer."""
        return self.forward + self.backward_input + self.backward_weight

    def stash_bytes(self, layers: slice) -> int:
        """What a stage of these layers keeps for each micro-batch in flight."""
        inside = range(layers.start, layers.stop)
        return sum(
            piece.bytes
            for piece in self._pieces
            if layers.start in piece.input_of or any(layer in inside for layer in piece.layers)
        )

    def rows(self) -> Iterator[Row]:
        """One row for each first layer, from the last layer to the first."""
        count = self.layers
        compute = np.cumsum(np.r_[0.0, self.seconds])
        static = np.cumsum(np.r_[0, self.static_bytes])
        for start, stash in zip(range(count - 1, -1, -1), self._stash_rows(), strict=True):
            peak = np.maximum.accumulate(self.peak_bytes[start:])
            yield Row(
                seconds=compute[start + 1 :] - compute[start],
                transfer_seconds=self.border_seconds[start] + self.border_seconds[start + 1 :],
                fixed_bytes=static[start + 1 :] - static[start] + peak + self.arriving_bytes[start:],
                stash_bytes=stash,
            )

    def _border_seconds(self, profile: Profile, link: Link) -> Floats:
        """Time to cross the border before each layer, forward and back.

        Infinite between layers that share parameters: such a border is not allowed.
        """
        seconds = np.zeros(self.layers + 1)
        trained = np.cumsum([info.gradient_bytes for info in profile.layers]) > 0
        for border in range(1, self.layers):
            forward = link.seconds(int(self.output_bytes[border - 1]))
            seconds[border] = 2 * forward if trained[border - 1] else forward
        index = {info.name: position for position, info in enumerate(profile.layers)}
        for position, info in enumerate(profile.layers):
            for other in info.shares_with:
                seconds[index[other] + 1 : position + 1] = np.inf
        return seconds

    def _stash_rows(self) -> Iterator[Floats]:
        """Bytes kept for each micro-batch by the stages that begin at one layer, from the last layer to the first.

        A piece counts from the first layer of the stage that keeps it; what the stage is given stays with it
        until its backward, kept by a layer or not.
        """
        count = self.layers
        first = np.zeros(count, dtype=np.int64)  # bytes by the first layer, from `start` on, that keeps them
        savers: list[list[int]] = [[] for _ in range(count)]
        given: list[list[int]] = [[] for _ in range(count)]
        for number, piece in enumerate(self._pieces):
            for layer in piece.layers:
                savers[layer].append(number)
            for layer in piece.input_of:
                given[layer].append(number)
        at: dict[int, int] = {}  # piece -> its first keeper from `start` on
        for start in range(count - 1, -1, -1):
            for number in savers[start]:
                size = self._pieces[number].bytes
                if number in at:
                    first[at[number]] -= size
                at[number] = start
                first[start] += size
            row = np.cumsum(first[start:])
            for number in given[start]:
                row[: at.get(number, count) - start] += self._pieces[number].bytes
            yield row.astype(np.float64)


def stage_slices(starts: Sequence[int], layers: int) -> list[slice]:
    """The layers of each stage."""
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], layers], strict=True)]
