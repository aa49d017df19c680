"""Computes the seconds and bytes of every range of layers of a profile as a stage."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ...cluster import Link
from ...profiling import Costs, Profile
from ...profiling.profile_document import STATE_PER_GRADIENT
from .shared_tensors import SharedTensors
from .skips import Skips
from .stage_memory import Floats, Ints, StageSizes

TOLERANCE = 1e-9  # predicted seconds that differ by less, relative to them, are equal


@dataclass(frozen=True)
class Row:
    """The stages that begin at one layer, one entry for each end from ``start + 1`` on.

    Attributes:
        start: the first layer.
        seconds: forward and backward of one micro-batch on a device of speed 1.
        recompute_seconds: the forward once more; 0 where the stage has no backward.
        sizes: bytes, one row for each end and one column; None if they were not asked for.
        passing, waiting: bytes of live values that go past the stage, and an upper bound of those that wait there for
            each micro-batch in flight, which ``sizes`` does not count; None if no values of the chain skip layers.
    """

    start: int
    seconds: Floats
    recompute_seconds: Floats
    sizes: StageSizes | None
    passing: Ints | None = None
    waiting: Ints | None = None


class ChainCosts:
    """Seconds and bytes of every range of layers ``[a, b)`` of a profile at one micro-batch size.

    Args:
        profile: the layers.
        costs: their costs.
        colocate: pairs of layers, by index, that stay in one stage.
        no_border: layers, by index, that no stage begins with.
        allow_split_ties: allow borders between layers that share a parameter or buffer. Each later stage then holds a
            copy of the shared tensors and of their gradients.
        gathers_outputs: the loss is computed once, on the outputs of all micro-batches (``reduction="batch"``). The
            last stage then also holds all outputs twice, in parts and gathered, and the workspace of that loss, which
            includes the gradient.
        may_relay: links differ, so stages may relay live values that they do not use.

    Attributes:
        micro_batches, layers: their numbers.
        forward, backward_input, backward_weight: seconds of each layer; the loss counts in the last one.
        split: extra seconds of a split backward of each layer; None if it was not measured.
        output_bytes: of each layer, with the live values that go on behind it.
        skips: the live values that may go past stages.
        trained: for each layer, True if it or a layer before it has trained parameters.
        has_backward: for each layer, True if a stage that ends there has a backward.
        sums: running sums of ``forward``, ``backward_input``, ``backward_weight`` and ``split`` (zeros if that was not
            measured), from 0.0 on: [4, layers + 1].
        compute_sums, forward_sums: running sums of all seconds and of the forwards.
        state_per_gradient: bytes of optimizer state for each byte of gradients.
    """

    def __init__(
        self,
        profile: Profile,
        costs: Costs,
        colocate: Collection[tuple[int, int]] = (),
        no_border: Collection[int] = (),
        allow_split_ties: bool = True,
        gathers_outputs: bool = False,
        may_relay: bool = False,
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
        self.seconds = self.forward + self.backward_input + self.backward_weight
        self.compute_sums = np.cumsum(np.r_[0.0, self.seconds])
        rows = (
            self.forward,
            self.backward_input,
            self.backward_weight,
            np.nan_to_num(np.array(split, float)),
        )
        self.sums = np.cumsum(np.pad(np.array(rows), ((0, 0), (1, 0))), axis=1)
        self.forward_sums = self.sums[0]

        self.output_bytes = np.array([layer.output_bytes for layer in costs.layers])
        self._workspace = _workspaces(costs)
        gradients_of_output = [layer.output_gradient_bytes for layer in costs.layers]
        self._output_gradient = np.where(
            [one is None for one in gradients_of_output],
            self.output_bytes,
            [one or 0 for one in gradients_of_output],
        )
        self._gathered: Ints = np.zeros(5, dtype=np.int64)
        self._saved_by_loss = 0
        if gathers_outputs:
            # The loss of the mini-batch runs in the last forward, on all outputs as one tensor. Its workspace grows
            # with the samples, and nothing of it is kept for each micro-batch.
            of_loss, outputs = costs.loss, costs.micro_batches * costs.layers[-1].output_bytes
            # The target stays until the end of its backward: an upper bound if the loss saves it as well.
            backward = of_loss.workspace_bytes + of_loss.input_bytes
            workspace = max(backward, of_loss.forward_workspace_bytes or 0) + of_loss.saved_bytes
            self._gathered[:] = 2 * outputs
            self._gathered[0] += costs.micro_batches * workspace
            self._saved_by_loss = of_loss.saved_bytes
        self.skips = Skips(costs, may_relay)
        self._tables: dict[int, Floats] = {}
        self._saved = tuple(piece for piece in costs.saved if not piece.passed_by)
        self._saved_bytes = np.array([piece.bytes for piece in self._saved], dtype=np.int64)
        deferred = _deferred(profile, costs)
        # Memory that the previous layer has saved already is not counted again as deferred.
        deferred_behind = np.r_[deferred[1:], 0]
        self._saved_and_deferred = np.zeros(self.layers, dtype=np.int64)
        for piece in self._saved:
            for layer, behind in pairwise(piece.layers):
                self._saved_and_deferred[layer] += piece.bytes if behind == layer + 1 else 0
        self._saved_and_deferred = np.minimum(self._saved_and_deferred, deferred_behind)
        self._kept = _Uses([piece.layers for piece in self._saved], self.layers)
        self._inputs = _Uses([piece.input_of for piece in self._saved], self.layers)
        gradients = [info.gradient_bytes for info in profile.layers]
        static = [
            info.parameter_bytes + info.gradient_bytes + info.buffer_bytes + profile.optimizer_bytes(info)
            for info in profile.layers
        ]
        self.state_per_gradient = STATE_PER_GRADIENT[profile.optimizer]
        self._static_sums = np.cumsum([0, *static])
        self._gradient_sums = np.cumsum([0, *gradients])
        self._deferred_sums = np.cumsum([0, *deferred])
        self.trained = np.cumsum(gradients) > 0
        # A profile made by hand may have seconds of a backward and no gradient bytes.
        self.has_backward = self.trained | (np.cumsum(self.backward_input + self.backward_weight) > 0)

        index = {info.name: position for position, info in enumerate(profile.layers)}
        self._shared = SharedTensors(profile, index)
        tied = [(index[owner], index[info.name]) for info in profile.layers for owner in info.shares_with]
        self._no_border = np.zeros(self.layers + 1, dtype=bool)
        for first, last in [*colocate, *([] if allow_split_ties else tied)]:
            self._no_border[min(first, last) + 1 : max(first, last) + 1] = True
        self._no_border[list(no_border)] = True
        self._no_border[[0, -1]] = False

    @property
    def total_seconds(self) -> float:
        """Forward and backward of all layers for one micro-batch."""
        return float(self.compute_sums[-1])

    @cached_property
    def allowed_borders(self) -> NDArray[np.int64]:
        """The layers, by index, that a stage other than the first may begin with."""
        return np.flatnonzero(~self._no_border[1:-1]) + 1

    def may_exceed(self, memory: float) -> bool:
        """Return True if some plan may need more bytes on a device; never True for infinity."""
        return memory < math.inf and memory < self._most_bytes

    @cached_property
    def _most_bytes(self) -> float:
        """Bytes that no device needs more than: all layers one by one, with all micro-batches, versions and replicas.

        There are at most as many versions of weights as stages, and as many replicas as micro-batches.
        """
        layers = np.arange(self.layers)
        each = StageSizes.of_table(self.size_table(np.stack([layers, layers + 1], axis=1)))
        versions = max(self.layers, self.micro_batches)
        fixed = each.static.sum() + versions * each.version.sum() + each.transient.max(axis=2).sum()
        kept = each.per_micro_batch.sum() + each.messages.sum()
        return float(fixed + self.micro_batches * (kept + 2 * sum(gap.bytes for gap in self.skips.gaps)))

    def sizes(self, layers: slice) -> StageSizes:
        """The bytes of one stage: one cut, one stage. Live values that wait there are not counted."""
        start, stop = layers.start, layers.stop
        numbers, layers_of_uses = self._kept.of(start, stop), self._kept.layers_of(start, stop)
        different, at = np.unique(numbers, return_index=True)
        keepers = layers_of_uses[at]
        first = np.bincount(keepers, self._saved_bytes[different], minlength=stop).astype(np.float64)
        first_keeper = dict(zip(different.tolist(), keepers.tolist(), strict=True))
        stash, boundary = self._stashes(start, stop, first, first_keeper)
        return self._sizes(start, stop, stash, boundary, slice(stop - start - 1, stop - start))

    def size_table(self, edges: NDArray[np.int64]) -> Floats:
        """[cuts, stages, columns]: :attr:`.StageSizes.table` of each stage of cuts, given :meth:`edges` of the cuts.

        A stage that occurs again is not computed again.
        """
        codes, at = np.unique(edges[:, :-1] * (self.layers + 1) + edges[:, 1:], return_inverse=True)
        for code in codes.tolist():
            if code not in self._tables:
                self._tables[code] = self.sizes(slice(*divmod(code, self.layers + 1))).table[0, 0]
        table = np.array([self._tables[code] for code in codes.tolist()])
        return table[at.reshape(len(edges), -1)]

    def edges(self, borders: NDArray[np.int64]) -> NDArray[np.int64]:
        """[cuts, stages + 1]: the first layers of the stages, and the end of the last one, of cuts [cuts, borders]."""
        ends = np.full((len(borders), 1), self.layers)
        return np.hstack([np.zeros_like(ends), borders, ends])

    def border_seconds(self, link: Link) -> Floats:
        """Seconds to cross the border before each layer, forward and back; infinite where none is allowed.

        No gradient is sent back if no layer before the border is trained. Entry 0 and the last one are the ends of
        the model, where nothing is sent.
        """
        seconds = np.zeros(self.layers + 1)
        rate = link.message_bandwidth
        once = link.latency + (self.output_bytes[:-1] / rate if rate else 0.0)
        seconds[1:-1] = np.where(self.trained[:-1], 2 * once, once)
        seconds[self._no_border] = np.inf
        return seconds

    def last_end_within_seconds(self, start: int, seconds: float) -> int:
        """The last end of a stage from ``start`` on that computes for at most ``seconds``; at least one layer."""
        limit = self.compute_sums[start] + seconds * (1 + TOLERANCE)
        return max(int(np.searchsorted(self.compute_sums, limit, "right")) - 1, start + 1)

    def rows(self, last_ends: Sequence[int], *, with_sizes: bool = True) -> Iterator[Row]:
        """Yield one row for each first layer, from the last layer to the first, up to its end in ``last_ends``.

        O(layers + saved tensors) besides the rows themselves. A saved tensor counts at the first layer of the stage
        that keeps it; the stage's input counts from its first layer on, whether a layer keeps it or not.
        """
        count = self.layers
        first = np.zeros(count)  # bytes by the first layer, from `start` on, that keeps them
        first_keeper: dict[int, int] = {}
        for start in range(count - 1, -1, -1):
            for number in self._kept.of(start, start + 1).tolist() if with_sizes else ():
                size = self._saved[number].bytes
                if number in first_keeper:
                    first[first_keeper[number]] -= size
                first_keeper[number] = start
                first[start] += size
            end = last_ends[start]
            sizes = waiting = passing = None
            if with_sizes:
                sizes = self._sizes(start, end, *self._stashes(start, end, first, first_keeper))
            if self.skips:
                up_to = np.arange(start + 1, end + 1)
                passing = self.skips.passing(start, up_to)
                waiting = np.where(self.has_backward[start:end], self.skips.waiting(start, up_to), 0)
            ends = slice(start + 1, end + 1)
            forward = self.forward_sums[ends] - self.forward_sums[start]
            yield Row(
                start,
                self.compute_sums[ends] - self.compute_sums[start],
                np.where(self.has_backward[start:end], forward, 0.0),
                sizes,
                passing,
                waiting,
            )

    def _stashes(
        self, start: int, end: int, first: Floats, first_keeper: Mapping[int, int]
    ) -> tuple[Floats, Floats | Ints | int]:
        """Return the stash and the boundary of stages from ``start`` on, for each end up to ``end``.

        Args:
            start, end: layers.
            first: for each layer from ``start`` on, the bytes that it is the first to keep.
            first_keeper: for each saved tensor, that layer.
        """
        stash: Floats = np.cumsum(first[start:end])
        boundary: Floats | Ints | int = 0
        gets_gradient = start > 0 and self.has_backward[start - 1]
        for number in self._inputs.of(start, start + 1).tolist():
            if gets_gradient:  # otherwise only layers keep it
                stash[: first_keeper.get(number, self.layers) - start] += self._saved[number].bytes
            boundary += self._saved[number].bytes
        if self.skips:
            skipping = self.skips.kept(start, np.arange(start + 1, end + 1))
            stash, boundary = stash + skipping[0], boundary + skipping[1]
        return stash, boundary

    def _sizes(
        self, start: int, stop: int, stash: Floats, boundary: Floats | Ints | int, which: slice = slice(None)
    ) -> StageSizes:
        """Return the bytes of the stages ``start`` to ``end``, for each end up to ``stop``; ``which`` selects ends."""
        ends = np.arange(start + 1, stop + 1)[which]
        static = self._static_sums[ends] - self._static_sums[start]
        if self._shared:
            static = static + self._shared.copied(start, ends)
        passing = self.skips.passing(start, ends) if self.skips else 0
        trains = self.has_backward[ends - 1]
        deferred = self._deferred_sums[ends] - self._deferred_sums[start]
        gradient = np.where(ends < self.layers, np.maximum(self._output_gradient[ends - 1] - passing, 0), 0)
        if self._shared:
            gradient = gradient + self._shared.arriving_gradients(start, ends)
        kept = np.empty((len(ends), 1, 3))
        kept[:, 0, 0] = stash[which] - np.where(ends == self.layers, self._saved_by_loss, 0)
        kept[:, 0, 1] = boundary if isinstance(boundary, int) else boundary[which]
        kept[:, 0, 2] = deferred
        kept[~trains] = 0
        given = self.output_bytes[start - 1] if start else 0
        messages = np.zeros((len(ends), 1, 2))
        messages[:, 0, 0] = np.maximum(given - passing, 0)
        messages[:, 0, 1] = np.where(trains, gradient, 0)
        transient = self._transient(start, stop, stash, gradient, passing, which)
        transient[ends == self.layers] += self._gathered
        transient[~trains, 1:] = 0
        transient[~trains, 0] += given
        version = self._gradient_sums[ends] - self._gradient_sums[start]
        return StageSizes(static[:, None], version[:, None], kept, messages, transient[:, None])

    def _transient(
        self, start: int, stop: int, stash: Floats, gradient: Ints, passing: Ints | int, which: slice
    ) -> Floats:
        """[ends, 5]: the most that F, B, I, W and a first B need besides what is kept while they run.

        ::

            F   stash up to the layer + its workspace                           as the layers run, the stash grows
            B   stash up to the layer + its workspace + gradient of its output  ... and shrinks
            I   the same + what the layers behind it keep for W
            first B     as B + the gradients of the weights of the layers behind it

        The gradient of the stage's own output is there during the whole backward.
        """
        layers = slice(start, stop)
        forward, backward, inputs, weights = self._workspace[:, layers]
        incoming = self._output_gradient[layers]
        deferred, made = self._deferred_sums[start + 1 : stop + 1], self._gradient_sums[start + 1 : stop + 1]
        goes_back = self.has_backward[layers]
        found = np.empty((len(goes_back[which]), 5))
        keeps = np.maximum.accumulate(stash + forward) - stash
        found[:, 0] = np.where(goes_back, keeps, np.maximum.accumulate(forward))[which]
        for column, own, gone in ((1, backward, 0), (2, inputs, deferred), (4, backward, made)):
            # The layers before the last one of the stage, whose output gradient is that of the stage.
            shared = self._saved_and_deferred[layers] if column == 2 else 0
            needs = np.where(goes_back, stash + own - gone, -np.inf)
            before = np.maximum.accumulate(needs + incoming - shared)
            before = np.r_[-np.inf, before[:-1]][which] - passing
            level = np.maximum(before, needs[which]) + gradient
            found[:, column] = np.maximum(level - (stash - gone)[which], 0)
        found[:, 3] = np.maximum.accumulate(weights)[which]
        return found


class _Uses:
    """The saved tensors of each layer: kept by it, or inputs of it, as ``layers_of`` has it for each tensor."""

    def __init__(self, layers_of: Sequence[Sequence[int]], layers: int) -> None:
        pairs = sorted((layer, number) for number, own in enumerate(layers_of) for layer in own)
        self._layers, self._numbers = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        self._first = np.searchsorted(self._layers, np.arange(layers + 1))

    def of(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the numbers of the tensors of these layers, one for each use."""
        return self._numbers[self._first[start] : self._first[stop]]

    def layers_of(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the layer of each of these uses."""
        return self._layers[self._first[start] : self._first[stop]]


def _workspaces(costs: Costs) -> Ints:
    """[4, layers]: the bytes that F, B, I and W of each layer need temporarily."""
    rows = [
        (
            layer.forward_workspace_bytes,
            layer.workspace_bytes,
            layer.input_workspace_bytes,
            layer.weight_workspace_bytes,
        )
        for layer in costs.layers
    ]
    return np.array([[layer[1] if one is None else one for one in layer] for layer in rows], dtype=np.int64).T


def _deferred(profile: Profile, costs: Costs) -> Ints:
    """[layers]: the bytes that each keeps from I to W. Gradients of weights that layers share are not deferred."""
    pairs = zip(profile.layers, costs.layers, strict=True)
    return np.array(
        [0 if info.shared and not info.gradient_bytes else layer.deferred_bytes for info, layer in pairs],
        dtype=np.int64,
    )
