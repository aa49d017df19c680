"""What any stage of a profiled chain costs: the rows that the cut chooses from."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...cluster import Link
from ...profiling import Costs, Profile

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """What a stage costs that begins at layer ``start``, for each end from ``start + 1`` on.

    Attributes:
        start: its first layer.
        seconds: compute on a device of speed 1.
        again_seconds: of it the forward, to run once more.
        fixed_bytes: what it holds however many micro-batches are in flight.
        version_bytes: what it holds besides for each older version of its weights.
        stash_bytes: what it holds for each of them; nothing where there is no backward.
        boundary_bytes: what it holds for each whose forward is to run once more; a part of the stash.
    """

    start: int
    seconds: Floats
    again_seconds: Floats
    fixed_bytes: Floats
    version_bytes: Floats
    stash_bytes: Floats
    boundary_bytes: Floats


class ChainCosts:
    """Seconds and bytes of every run of layers ``[a, b)`` of a profile at one micro-batch size.

    Args:
        profile: the layers.
        costs: what they cost.
        colocate: pairs of layers, by index, that no border may part; those that share parameters are added.
        no_border: borders that are not allowed besides: the indices of the layers behind them.
        allow_split_ties: allow borders between layers that share parameters. Each later stage then holds a copy of the
            shared parameters and of their gradients.
    """

    def __init__(
        self,
        profile: Profile,
        costs: Costs,
        colocate: Collection[tuple[int, int]] = (),
        no_border: Collection[int] = (),
        allow_split_ties: bool = True,
    ) -> None:
        self.micro_batches = costs.micro_batches
        self.layers = len(costs.layers)
        self.forward = np.array([layer.forward.seconds for layer in costs.layers])
        self.backward_input = np.array([layer.backward_input.seconds for layer in costs.layers])
        self.backward_weight = np.array([layer.backward_weight.seconds for layer in costs.layers])
        split = [layer.split_seconds for layer in costs.layers]
        self.split = None if None in split else np.array(split, dtype=np.float64)
        self.forward[-1] += costs.loss.forward.seconds
        self.backward_input[-1] += costs.loss.backward_seconds
        self.static_bytes = np.array(
            [
                info.parameter_bytes + info.gradient_bytes + profile.optimizer_bytes(info)
                for info in profile.layers
            ]
        )
        self.output_bytes = np.array([layer.output_bytes for layer in costs.layers])
        self.peak_bytes = np.array([layer.workspace_bytes for layer in costs.layers])
        # The gradient of a stage's output arrives before its backward starts; the last stage makes its own.
        self.arriving_bytes = np.r_[self.output_bytes[:-1], 0]
        self._pieces = costs.saved
        self._waiting_sum = np.cumsum(np.r_[0, [layer.deferred_bytes for layer in costs.layers]])
        self.trained = np.cumsum([info.gradient_bytes for info in profile.layers]) > 0
        # Whether there is a backward at a layer: it or one before it trains something. A profile made by hand may
        # say so in seconds alone.
        self.backward_at = self.trained | (np.cumsum(self.backward_input + self.backward_weight) > 0)
        index = {info.name: position for position, info in enumerate(profile.layers)}
        # Of each layer that holds parameters of others: its place, that of the last of these, and their bytes.
        self._shared = np.array(
            [
                (
                    position,
                    max(index[other] for other in info.shares_with),
                    sum(tensor.bytes + tensor.gradient_bytes for tensor in info.shared),
                )
                for position, info in enumerate(profile.layers)
                if info.shares_with
            ],
            dtype=np.int64,
        ).reshape(-1, 3)
        shared = [] if allow_split_ties else self._ties(profile, index)
        self._no_border = self._forbidden([*colocate, *shared], no_border)
        self.compute_sums = np.cumsum(np.r_[0.0, self.seconds])
        self.forward_sums = np.cumsum(np.r_[0.0, self.forward])
        self._static_sum = np.cumsum(np.r_[0, self.static_bytes])
        self._trained_sum = np.cumsum([0, *(info.gradient_bytes for info in profile.layers)])

    @property
    def seconds(self) -> Floats:
        """Forward and backward of each layer."""
        return self.forward + self.backward_input + self.backward_weight

    @property
    def total_seconds(self) -> float:
        """Forward and backward of all layers."""
        return float(self.compute_sums[-1])

    @property
    def total_static_bytes(self) -> int:
        """Parameters, gradients and optimizer state of all layers."""
        return int(self._static_sum[-1])

    def held_bytes(self, layers: slice) -> int:
        """Parameters, gradients and optimizer state of a stage of these layers."""
        own = int(self._static_sum[layers.stop] - self._static_sum[layers.start])
        return own + int(self._copied(layers.start, layers.stop)[-1])

    def version_bytes(self, layers: slice) -> int:
        """What one more version of the weights that a stage of these layers trains takes up."""
        return int(self._trained_sum[layers.stop] - self._trained_sum[layers.start])

    def stash_bytes(self, layers: slice) -> int:
        """What a stage of these layers keeps for each micro-batch in flight."""
        if not self.needs_backward(layers):
            return 0
        inside = range(layers.start, layers.stop)
        return sum(
            piece.bytes
            for piece in self._pieces
            if layers.start in piece.input_of or any(layer in inside for layer in piece.layers)
        )

    def boundary_bytes(self, layers: slice) -> int:
        """What a stage of these layers is given, and keeps for each micro-batch whose forward is to run once more."""
        if not self.needs_backward(layers):
            return 0
        return sum(piece.bytes for piece in self._pieces if layers.start in piece.input_of)

    def waiting_bytes(self, layers: slice) -> int:
        """What a stage of these layers keeps between the two parts of a split backward, at most.

        Memory that several of its layers keep counts for each of them.
        """
        if not self.needs_backward(layers):
            return 0
        return int(self._waiting_sum[layers.stop] - self._waiting_sum[layers.start])

    def waiting_bytes_of(self, row: Row) -> Floats:
        """The same for the stages of a row."""
        ends = slice(row.start + 1, row.start + 1 + len(row.seconds))
        waiting = self._waiting_sum[ends] - self._waiting_sum[row.start]
        return np.where(self.backward_at[row.start : row.start + len(waiting)], waiting, 0.0)

    def kept_sizes(self, layers: slice) -> tuple[int, int, int]:
        """What a stage of these layers keeps of a micro-batch: stash, input alone, and what waits for W."""
        return self.stash_bytes(layers), self.boundary_bytes(layers), self.waiting_bytes(layers)

    def needs_backward(self, layers: slice) -> bool:
        """Whether a stage of these layers has a backward: it trains something, or a stage before it does."""
        return bool(self.backward_at[layers.stop - 1])

    def border_seconds(self, link: Link) -> Floats:
        """Time to cross the border before each layer, forward and back; infinite where none is allowed.

        No gradient is sent to stages that train nothing. Entry 0 and the last one are the ends of the model: nothing
        is sent there.
        """
        seconds = np.zeros(self.layers + 1)
        sizes = self.output_bytes[:-1]
        once = link.latency + (sizes / link.bandwidth if link.bandwidth else 0.0)
        seconds[1:-1] = np.where(self.trained[:-1], 2 * once, once)
        seconds[self._no_border] = np.inf
        return seconds

    def crossing_seconds(self, border: int, link: Link) -> float:
        """Time to cross one border, forward and back."""
        once = link.seconds(int(self.output_bytes[border - 1]))
        return 2 * once if self.trained[border - 1] else once

    def reach_seconds(self, start: int, seconds: float) -> int:
        """The last end of a stage from layer ``start`` on whose compute is within ``seconds``, at least one layer."""
        end = (
            int(np.searchsorted(self.compute_sums, self.compute_sums[start] + seconds * (1 + 1e-9), "right"))
            - 1
        )
        return max(end, start + 1)

    def reach_bytes(self, start: int, size: float) -> int:
        """The same for parameters, gradients and optimizer state within ``size`` bytes."""
        end = int(np.searchsorted(self._static_sum, self._static_sum[start] + size, "right")) - 1
        return max(end, start + 1)

    def rows(self, reach: Sequence[int]) -> Iterator[Row]:
        """One row for each first layer, from the last layer to the first, each up to its end in ``reach``.

        A piece of the stash counts from the first layer of the stage that keeps it; what the stage is given stays
        with it until its backward, kept by a layer or not.
        """
        count = self.layers
        first = np.zeros(count)  # bytes by the first layer, from `start` on, that keeps them
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
            end = reach[start]
            stash = np.cumsum(first[start:end])
            boundary = 0
            for number in given[start]:
                stash[: at.get(number, count) - start] += self._pieces[number].bytes
                boundary += self._pieces[number].bytes
            yield self._row(start, end, stash, boundary)

    def _row(self, start: int, end: int, stash: Floats, boundary: int) -> Row:
        ends = slice(start + 1, end + 1)
        backward = self.backward_at[start:end]
        peak = np.maximum.accumulate(self.peak_bytes[start:end])
        static = self._static_sum[ends] - self._static_sum[start]
        if len(self._shared):
            static = static + self._copied(start, end)
        return Row(
            start=start,
            seconds=self.compute_sums[ends] - self.compute_sums[start],
            again_seconds=np.where(backward, self.forward_sums[ends] - self.forward_sums[start], 0.0),
            fixed_bytes=static + peak + self.arriving_bytes[start:end],
            version_bytes=self._trained_sum[ends] - self._trained_sum[start],
            stash_bytes=np.where(backward, stash, 0.0),
            boundary_bytes=np.where(backward, float(boundary), 0.0),
        )

    def _copied(self, start: int, end: int) -> NDArray[np.int64]:
        """What a stage from ``start`` on holds of parameters that belong to a stage before, for each end."""
        layer, latest, size = self._shared.T
        copied = (latest < start) & (start <= layer) & (layer < end)
        sizes = np.zeros(end - start, dtype=np.int64)
        np.add.at(sizes, layer[copied] - start, size[copied])
        return np.cumsum(sizes)

    @staticmethod
    def _ties(profile: Profile, index: Mapping[str, int]) -> list[tuple[int, int]]:
        return [(index[other], index[info.name]) for info in profile.layers for other in info.shares_with]

    def _forbidden(
        self, colocate: Collection[tuple[int, int]], no_border: Collection[int]
    ) -> NDArray[np.bool_]:
        forbidden = np.zeros(self.layers + 1, dtype=bool)
        for one, other in colocate:
            forbidden[min(one, other) + 1 : max(one, other) + 1] = True
        forbidden[list(no_border)] = True
        forbidden[[0, -1]] = False
        return forbidden
