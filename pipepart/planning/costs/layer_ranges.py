"""Computes the seconds and bytes of a stage, for every range of layers of a profile."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ...capture import LayerInfo
from ...cluster import Link
from ...profiling import Costs, Profile
from ...profiling.profile_document import STATE_PER_GRADIENT
from .shared_tensors import SharedTensors
from .skips import Skips
from .stage_memory import COLUMNS, FIXED, KEPT, MESSAGES, WORKSPACE, Floats, Ints, StageSizes

TOLERANCE = 1e-9  # predicted seconds with a smaller relative difference count as equal


def split_share(split: Floats | float, backward: Floats | float) -> Floats:
    """Return the time of I and W together as a share of the full backward; 1 for a stage without a backward.

    Args:
        split: seconds that I and W take more than the full backward; negative if they take less.
        backward: seconds of the full backward.
    """
    extra = np.asarray(split, dtype=np.float64)
    of_backward = np.divide(extra, backward, np.zeros_like(extra), where=np.asarray(backward) > 0)
    return np.maximum(0.0, 1 + of_backward)


@dataclass(frozen=True)
class Row:
    """Costs of the stages that begin at the same layer, one entry for each end from ``start + 1`` on: [ends].

    Attributes:
        start: the first layer.
        seconds: forward and backward of one micro-batch on a device of speed 1.
        recompute_seconds: seconds of a repeated forward; 0 where the stage has no backward.
        sizes: bytes of the stages: [ends, 1]; None if they were not asked for.
        passing: bytes of skipping values that go past the stage; None if the chain has no skip connections.
        waiting: an upper bound of the bytes of skipping values that wait at the stage for each micro-batch in flight.
            ``sizes`` does not count them. None if the chain has no skip connections.
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
        costs: the costs of the layers at the micro-batch size.
        colocate: pairs of layers, by index, that stay in one stage.
        no_border: layers, by index, that no stage begins with.
        allow_split_ties: allow borders between layers that share a parameter or buffer. Each later stage then holds a
            copy of the shared tensors and of their gradients.
        gathers_outputs: the loss is computed once, on the outputs of all micro-batches (``reduction="batch"``). The
            last stage then also holds all outputs twice (as micro-batches and as one tensor) and the workspace of that
            loss, with the gradient.
        shards: number of replicas that share the parameters of a stage, each with all of them during the step; 1 if
            they are not sharded.

    Attributes:
        micro_batches, layers: the number of micro-batches and of layers.
        scale: seconds of each micro-batch relative to the mean; empty if all have the same size.
        forward, backward_input, backward_weight: seconds of each layer: [layers]. The last layer includes the loss.
        split: extra seconds of a split backward of each layer; None if it was not measured.
        output_bytes: bytes that cross the border after each layer: its output and skipping values.
        skips: the values that skip layers.
        trained: for each layer, True if it or a layer before it has trained parameters.
        has_backward: for each layer, True if a stage that ends there has a backward.
        sums: running sums of ``forward``, ``backward_input``, ``backward_weight`` and ``split`` (zeros if that was not
            measured), from 0.0 on: [4, layers + 1].
        compute_sums, forward_sums: running sums of all seconds and of the forwards.
        state_per_gradient: bytes of optimizer state for each byte of gradients.
        shards: as given.
    """

    def __init__(
        self,
        profile: Profile,
        costs: Costs,
        colocate: Collection[tuple[int, int]] = (),
        no_border: Collection[int] = (),
        allow_split_ties: bool = True,
        gathers_outputs: bool = False,
        shards: int = 1,
    ) -> None:
        self.micro_batches, self.scale = costs.micro_batches, costs.scale
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
            [size is None for size in gradients_of_output],
            self.output_bytes,
            [size or 0 for size in gradients_of_output],
        )
        self._gathered: Ints = np.zeros(5, dtype=np.int64)
        self._saved_by_loss = 0
        if gathers_outputs:
            # The loss of the mini-batch runs in the last forward, on all outputs as one tensor. Its workspace grows
            # with the samples, and it saves nothing per micro-batch.
            loss, outputs = costs.loss, costs.micro_batches * costs.layers[-1].output_bytes
            # The target stays until the end of its backward: an upper bound if the loss saves it as well.
            backward = loss.workspace_bytes + loss.input_bytes
            workspace = max(backward, loss.forward_workspace_bytes or 0) + loss.saved_bytes
            self._gathered[:] = 2 * outputs
            self._gathered[0] += costs.micro_batches * workspace
            self._saved_by_loss = loss.saved_bytes
        self.skips = Skips(costs)
        saved = costs.saved
        self._saved_bytes = np.array([tensor.bytes for tensor in saved], dtype=np.int64)
        self._goes_past = np.array([bool(tensor.passed_by) for tensor in saved], dtype=bool)
        # For each layer and saved tensor, the first layer from there on that keeps it, and, if the tensor is an input
        # there, the first that uses it. The number of layers stands for none: [layers, tensors].
        self._keeper = _next_layers([tensor.layers for tensor in saved], self.layers)
        users = [sorted({*tensor.input_of}.difference(tensor.passed_by)) for tensor in saved]
        self._user = _next_layers(users, self.layers)
        for number, tensor in enumerate(saved):
            self._user[~np.isin(np.arange(self.layers), tensor.input_of), number] = self.layers
        deferred = _deferred(profile, costs)
        # Memory that a layer has saved already is not counted again as deferred by the next layer.
        saved_by_both = np.zeros(self.layers, dtype=np.int64)
        for tensor in saved:
            for layer, next_layer in pairwise(() if tensor.passed_by else tensor.layers):
                saved_by_both[layer] += tensor.bytes * (next_layer == layer + 1)
        self._saved_and_deferred = np.minimum(saved_by_both, np.r_[deferred[1:], 0])
        gradients = [info.gradient_bytes for info in profile.layers]
        static = [static_bytes(info, profile.optimizer_bytes(info), shards) for info in profile.layers]
        self.shards = shards
        self.state_per_gradient = STATE_PER_GRADIENT[profile.optimizer]
        self._static_sums = np.cumsum([0, *static])
        self._gradient_sums = np.cumsum([0, *gradients])
        self._deferred_sums = np.cumsum([0, *deferred])
        self.trained = np.cumsum(gradients) > 0
        # A profile written by hand may have seconds of a backward and no gradient bytes.
        self.has_backward = self.trained | (np.cumsum(self.backward_input + self.backward_weight) > 0)

        index = {info.name: position for position, info in enumerate(profile.layers)}
        self._shared = SharedTensors(profile, index)
        tied = [(index[owner], index[info.name]) for info in profile.layers for owner in info.shares_with]
        self._no_border = np.zeros(self.layers + 1, dtype=bool)
        for first, last in [*colocate, *([] if allow_split_ties else tied)]:
            self._no_border[min(first, last) + 1 : max(first, last) + 1] = True
        self._no_border[list(no_border)] = True
        self._no_border[[0, -1]] = False
        self._tables: dict[int, Floats] = {}

    @property
    def total_seconds(self) -> float:
        """Seconds of forward and backward of all layers for one micro-batch."""
        return float(self.compute_sums[-1])

    @cached_property
    def allowed_borders(self) -> NDArray[np.int64]:
        """The layers, by index, that a stage other than the first may begin with, increasing."""
        return np.flatnonzero(~self._no_border[1:-1]) + 1

    def may_exceed(self, memory: float) -> bool:
        """Return True if some plan may need more than ``memory`` bytes on a device; False for infinity."""
        return memory < math.inf and (memory < self._static_sums[-1] or memory < self._most_bytes)

    @cached_property
    def _most_bytes(self) -> float:
        """An upper bound of the bytes that a device needs: every layer a stage, with all micro-batches in flight.

        It counts one weight version per layer or one replica per micro-batch, whichever number is larger.
        """
        stages = [self._stages(layer, layer + 1) for layer in range(self.layers)]
        each = StageSizes(np.stack(stages, axis=1))
        versions = max(self.layers, self.micro_batches)
        fixed = each.static.sum() + versions * each.version.sum() + each.transient.max(axis=2).sum()
        per_micro_batch = each.per_micro_batch.sum() + each.messages.sum() + 2 * self.skips.total_bytes
        return float(fixed + self.micro_batches * per_micro_batch)

    @property
    def static_of_layers(self) -> Ints:
        """Parameters, gradients, optimizer state and buffers of stages of one layer each, in bytes: [layers]."""
        static = np.diff(self._static_sums)
        if self._shared:
            static += [self._shared.copied(at, np.array([at + 1]))[0] for at in range(self.layers)]
        return static

    def edges(self, borders: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first layer of each stage and the end of the last stage: [cuts, stages + 1].

        Args:
            borders: the first layer of each stage but the first: [cuts, borders].
        """
        ends = np.full((len(borders), 1), self.layers)
        return np.hstack([np.zeros_like(ends), borders, ends])

    def sizes(self, layers: slice) -> StageSizes:
        """Return the bytes of one stage: [1, 1]. Skipping values that wait there are not counted."""
        return self.sizes_of(np.array([[layers.start, layers.stop]]))

    def sizes_of(self, edges: NDArray[np.int64]) -> StageSizes:
        """Return the bytes of the stages of cuts, [cuts, stages], without skipping values that wait there.

        Args:
            edges: from :meth:`edges`.
        """
        starts, ends = edges[:, :-1], edges[:, 1:]
        table = np.empty((*starts.shape, FIXED + COLUMNS))
        for start in np.unique(starts).tolist():
            at = starts == start
            table[at] = self._table(start)[ends[at] - start - 1]
        return StageSizes(table)

    def message_bytes(self, borders: NDArray[np.int64]) -> Ints:
        """Return the bytes that each stage sends to the next stage: [cuts, borders].

        Args:
            borders: the first layer of each stage but the first: [cuts, borders].
        """
        sizes = self.output_bytes[borders - 1]
        if self.skips:
            skips, between = self.skips.transfers(borders), np.arange(borders.shape[1])[:, None, None]
            over = (skips.source <= between) & (between < skips.target)  # [borders, cuts, skips]
            sizes = np.maximum(sizes - (over * skips.bytes).sum(axis=2).T, 0)  # estimated bytes are rounded
        return sizes

    def border_seconds(self, link: Link) -> Floats:
        """Return the seconds to cross the border before each layer, forward and back: [layers + 1].

        They are infinite where no border is allowed. No gradient is sent back if no layer before the border is trained.
        The first and last entries are the ends of the model, where nothing is sent.
        """
        seconds = np.zeros(self.layers + 1)
        once = link.latency + self.output_bytes[:-1] * link.seconds_per_byte
        seconds[1:-1] = np.where(self.trained[:-1], 2 * once, once)
        seconds[self._no_border] = np.inf
        return seconds

    def last_end_within(self, start: int, seconds: float, memory: float) -> int:
        """Return the last end of a stage from ``start`` on within these limits (at least one layer).

        Args:
            start: the first layer.
            seconds: limit of its compute.
            memory: limit in bytes of what it holds all the time.
        """
        limit = self.compute_sums[start] + seconds * (1 + TOLERANCE)
        of_seconds = np.searchsorted(self.compute_sums, limit, "right")
        of_memory = np.searchsorted(self._static_sums, self._static_sums[start] + memory, "right")
        return max(int(min(of_seconds, of_memory)) - 1, start + 1)

    def rows(self, last_ends: Sequence[int], *, with_sizes: bool = True) -> Iterator[Row]:
        """Yield the row of each first layer, from the last layer to the first, up to its end in ``last_ends``."""
        for start in range(self.layers - 1, -1, -1):
            end = last_ends[start]
            ends, waiting, passing = slice(start + 1, end + 1), None, None
            if self.skips:
                up_to = np.arange(start + 1, end + 1)
                passing = self.skips.passing(start, up_to)
                waiting = np.where(self.has_backward[start:end], self.skips.waiting(start, up_to), 0)
            forward = self.forward_sums[ends] - self.forward_sums[start]
            yield Row(
                start,
                self.compute_sums[ends] - self.compute_sums[start],
                np.where(self.has_backward[start:end], forward, 0.0),
                StageSizes(self._table(start)[: end - start, None]) if with_sizes else None,
                passing,
                waiting,
            )

    def _table(self, start: int) -> Floats:
        """Return the sizes of all stages that begin with a layer: [ends, columns]."""
        if start not in self._tables:
            self._tables[start] = self._stages(start, self.layers)
        return self._tables[start]

    def _stages(self, start: int, last_end: int) -> Floats:
        """Return the sizes of stages that begin with a layer, for ends from ``start + 1`` on: [ends, columns].

        A saved tensor counts from the first layer of the stage that keeps it. The stage's input counts from the first
        layer of the stage on if that gets a gradient, and a skipping value that the stage receives from its first user.
        """
        ends, layers = np.arange(start + 1, last_end + 1), slice(start, last_end)
        trains, is_last = self.has_backward[layers], ends == self.layers
        gets_gradient = start > 0 and self.has_backward[start - 1]
        user = self._user[start]
        kept_from = np.minimum(
            self._keeper[start], np.where(gets_gradient | self._goes_past, user, self.layers)
        )
        stash, boundary = (
            np.cumsum(
                np.bincount(first - start, self._saved_bytes, len(ends) + 1)[: len(ends)], dtype=np.float64
            )
            for first in (kept_from, user)
        )
        passing = self.skips.passing(start, ends)
        input_bytes = self.output_bytes[start - 1] if start else 0
        gradient = np.where(is_last, 0, np.maximum(self._output_gradient[layers] - passing, 0))
        gradient = gradient + self._shared.arriving_gradients(start, ends)
        transient = self._transient(layers, stash, gradient, passing)
        transient[is_last] += self._gathered
        transient[~trains, 1:] = 0
        transient[~trains, 0] += input_bytes
        table = np.zeros((len(ends), FIXED + COLUMNS))
        counted = table[:, FIXED:]
        static = self._static_sums[ends] - self._static_sums[start]
        table[:, 0] = static + self._shared.copied(start, ends)
        table[:, 1] = counted[:, -1] = self._gradient_sums[ends] - self._gradient_sums[start]
        deferred = self._deferred_sums[ends] - self._deferred_sums[start]
        counted[:, KEPT] = np.stack([stash - is_last * self._saved_by_loss, boundary, deferred], axis=1)
        counted[~trains, KEPT] = 0
        counted[:, MESSAGES] = np.stack(
            [np.maximum(input_bytes - passing, 0), np.where(trains, gradient, 0)], axis=1
        )
        counted[:, WORKSPACE] = transient
        return table

    def _transient(self, layers: slice, stash: Floats, gradient: Ints, passing: Ints) -> Floats:
        """Return the most bytes that F, B, I, W and a first B need besides the tensors that stages keep: [ends, 5].

        ::

            F         stash up to the layer + its workspace                             the stash grows as layers run
            B         stash up to the layer + its workspace + gradient of its output    the stash shrinks
            I         as B + deferred bytes of the later layers of the stage
            first B   as B + weight gradients of the later layers of the stage

        The gradient of the stage's output is in memory during the whole backward.
        """
        forward, backward, inputs, weights = self._workspace[:, layers]
        deferred, weight_gradients = self._deferred_sums[1:][layers], self._gradient_sums[1:][layers]
        has_backward = self.has_backward[layers]
        transient = np.empty((len(stash), 5))
        forward_peak = np.maximum.accumulate(stash + forward) - stash
        transient[:, 0] = np.where(has_backward, forward_peak, np.maximum.accumulate(forward))
        for column, workspace, later, counted_twice in (
            (1, backward, 0, 0),
            (2, inputs, deferred, self._saved_and_deferred[layers]),
            (4, backward, weight_gradients, 0),
        ):
            needs = np.where(has_backward, stash + workspace - later, -np.inf)
            # The layers before the last one have their output gradients besides that of the stage.
            before_last = np.maximum.accumulate(needs + self._output_gradient[layers] - counted_twice)
            before_last = np.r_[-np.inf, before_last[:-1]] - passing
            peak = np.maximum(before_last, needs) + gradient
            transient[:, column] = np.maximum(peak - (stash - later), 0)
        transient[:, 3] = np.maximum.accumulate(weights)
        return transient


def static_bytes(info: LayerInfo, optimizer_bytes: int, shards: int) -> int:
    """Return the bytes that a layer needs for a whole step: parameters, gradients, optimizer state and buffers.

    If replicas share the parameters, each holds its shard of the parameters and of the optimizer state, and during the
    step also all parameters and all gradients: ``fully_shard(..., reshard_after_forward=False)`` gathers the
    parameters once a step, and reduces the gradients once.
    """
    shard = -(-info.parameter_bytes // shards) if shards > 1 else 0
    return (
        info.parameter_bytes + shard + info.gradient_bytes + info.buffer_bytes + -(-optimizer_bytes // shards)
    )


def _next_layers(layers_of: Sequence[Sequence[int]], layers: int) -> Ints:
    """Return, for each layer and tensor, the first of the tensor's layers from there on; ``layers`` for none."""
    table = np.full((layers, len(layers_of)), layers)
    for number, chosen in enumerate(layers_of):
        table[list(chosen), number] = list(chosen)
    return np.minimum.accumulate(table[::-1])[::-1]


def _workspaces(costs: Costs) -> Ints:
    """Return the workspace bytes of F, B, I and W of each layer: [4, layers]."""
    rows = [
        (
            layer.forward_workspace_bytes,
            layer.workspace_bytes,
            layer.input_workspace_bytes,
            layer.weight_workspace_bytes,
        )
        for layer in costs.layers
    ]
    return np.array([[row[1] if size is None else size for size in row] for row in rows], dtype=np.int64).T


def _deferred(profile: Profile, costs: Costs) -> Ints:
    """Return the bytes that each layer keeps from I to W: [layers]. Gradients of shared weights are not deferred."""
    pairs = zip(profile.layers, costs.layers, strict=True)
    return np.array(
        [0 if info.shared and not info.gradient_bytes else layer.deferred_bytes for info, layer in pairs],
        dtype=np.int64,
    )
