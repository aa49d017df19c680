"""Sends skip connections directly to the stages that use them, and their gradients directly back.

::

    stage 0                     stage 1             stage 2                     stage 3
    out: [x, skip] ── [x, -] ──▶ [y, -] ── [y, -] ──▶ [z, -] ── [z, -] ──▶ fill ▶ [z, skip]
              └──────────────── (F, 3, k, from 0): [skip] ─────────────────▲
               ◀─────────────── (B, 0, k, from 3): [gradient] ─────────────┘

A value hops from the stage that makes it to the first one that uses it, and from there to the next one. So each hop has
the value that relaying it through every stage would bring. Its gradient comes back over the same hops, and each stage
adds that of the next hop to those of its own uses in one backward: the sums are those of relaying, bit for bit. In the
stages between, None takes the place of the value. Of messages that a stage sends at a time, that for the nearest stage
goes first, as it is needed first.

No wait is endless. F of a stage waits for a value from an earlier stage, and for the output of the stage before it,
which was made after that value. B of a stage waits for a gradient from a later stage, whose B comes before the B of the
next stage. A schedule orders the actions of adjacent stages, so it orders these, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any
from weakref import WeakKeyDictionary

from schedules import Kind, Schedule

from ...autograd import graph_cut
from ...capture import Live, Recording
from ...planning import Plan
from .threads import Key, Transport

# By stage: for each live value of its output, or input, the stage that it goes to, or comes from.
Ends = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Route:
    """The ways of the live values of one recording between the stages of a plan.

    Attributes:
        targets: by stage, for each live value behind it the stage that it sends it to; -1 if it does not have it.
        sources: by stage, for each live value before it the stage that it comes from; -1 if it does not get it.
    """

    targets: Ends
    sources: Ends


class Routes:
    """The routes of a pipeline's recordings, each found once."""

    def __init__(self, plan: Plan) -> None:
        self._ends = list(accumulate(len(stage.layers) for stage in plan.stages))
        self._stage_of = [number for number, stage in enumerate(plan.stages) for _ in stage.layers]
        self._found: WeakKeyDictionary[Recording, Route | None] = WeakKeyDictionary()

    def of(self, inputs: Iterable[Any]) -> dict[Recording, Route]:
        """Return the routes of the recordings of some inputs, without those in which every value is relayed."""
        recordings = {value.recording for value in inputs if isinstance(value, Live)}
        for recording in recordings:
            if recording not in self._found:
                self._found[recording] = self._route(recording)
        return {each: route for each in recordings if (route := self._found[each]) is not None}

    def _route(self, recording: Recording) -> Route | None:
        first = [0, *self._ends[:-1]]
        to: list[dict[int, int]] = [{} for _ in first]
        back: list[dict[int, int]] = [{} for _ in first]
        for number, layers in recording.touched.items():
            stages = list(dict.fromkeys(self._stage_of[layer] for layer in layers))
            for source, target in pairwise(stages):
                to[source][number] = target
                back[target][number] = source
        if all(target == stage + 1 for stage, targets in enumerate(to) for target in targets.values()):
            return None
        parts = recording.parts
        return Route(
            [
                [targets.get(number, -1) for number in parts[end - 1].gives]
                for targets, end in zip(to, self._ends, strict=True)
            ],
            [
                [targets.get(number, -1) for number in parts[begin].takes]
                for targets, begin in zip(back, first, strict=True)
            ],
        )


class SkipTransport:
    """Splits the messages between adjacent stages into those that go to each stage.

    Args:
        routes: of the recordings of the step's micro-batches.
        forward: the transport of the forwards, for a step that has their backwards only.
    """

    def __init__(
        self,
        inner: Transport,
        schedule: Schedule,
        routes: Mapping[Recording, Route],
        forward: SkipTransport | None = None,
    ) -> None:
        self._inner = inner
        self._routes = routes
        self._model_stages = schedule.model_stages
        # By stage and micro-batch: where the gradients of its output come from, and where those of its input go. In the
        # order of the leaves; each used by the stage's worker alone.
        self._targets: list[dict[int, list[int]]] = [{} for _ in schedule.device_of]
        self._sources: list[dict[int, list[int]]] = [{} for _ in schedule.device_of]
        if forward is not None:
            self._targets, self._sources = forward._targets, forward._sources

    def send(self, sender: int, receiver: int, key: Key, message: Any) -> None:
        """Send each part of an output, or of the gradients of an input, to its stage."""
        kind, _, micro_batch = key[:3]
        if kind is Kind.F and (route := self._route(message)):
            self._send_output(sender, receiver, micro_batch, message, route)
        elif kind is Kind.B and (sources := self._sources[sender].pop(micro_batch, None)) is not None:
            for source, values in sorted(_grouped(sources, message).items(), reverse=True):
                self._inner.send(sender, source, _key(Kind.B, source, micro_batch, sender), values)
        else:
            self._inner.send(sender, receiver, key, message)

    def recv(self, receiver: int, key: Key) -> Any:
        """Receive an input, or the gradients of an output, from all stages that send a part of it."""
        kind, _, micro_batch = key[:3]
        if kind is Kind.B and (targets := self._targets[receiver].pop(micro_batch, None)) is not None:
            return self._recv_gradients(receiver, micro_batch, targets)
        message = self._inner.recv(receiver, key)
        if kind is Kind.F and (route := self._route(message)):
            return self._filled(receiver, micro_batch, message, route)
        return message

    def _route(self, message: Any) -> Route | None:
        return self._routes.get(message.recording) if isinstance(message, Live) else None

    def _of_replica(self, ends: Ends, stage: int) -> list[int]:
        """Return the ends of a stage as stages of its replica."""
        in_model = stage % self._model_stages
        return [stage - in_model + end if end >= 0 else -1 for end in ends[in_model]]

    def _send_output(
        self, sender: int, following: int, micro_batch: int, message: Live, route: Route
    ) -> None:
        targets = self._of_replica(route.targets, sender)
        self._targets[sender][micro_batch] = _of_leaves(targets, message)
        sent = [
            value if target == following else None
            for target, value in zip(targets, message.tensors, strict=True)
        ]
        self._inner.send(sender, following, (Kind.F, following, micro_batch), Live(message.recording, sent))
        for target, values in sorted(_grouped(targets, message.tensors).items()):
            if target not in (-1, following):
                self._inner.send(sender, target, _key(Kind.F, target, micro_batch, sender), values)

    def _filled(self, receiver: int, micro_batch: int, message: Live, route: Route) -> Live:
        """Return the input of a stage with the values that have gone past stages."""
        sources = self._of_replica(route.sources, receiver)
        before = receiver - 1
        arrived = {
            source: iter(self._inner.recv(receiver, _key(Kind.F, receiver, micro_batch, source)))
            for source in dict.fromkeys(sources)
            if source not in (-1, before)
        }
        values = [
            next(arrived[source]) if source in arrived else value
            for source, value in zip(sources, message.tensors, strict=True)
        ]
        filled = Live(message.recording, tuple(values))
        self._sources[receiver][micro_batch] = _of_leaves(sources, filled)
        return filled

    def _recv_gradients(self, receiver: int, micro_batch: int, targets: Sequence[int]) -> graph_cut.Gradients:
        arrived = {
            target: iter(self._inner.recv(receiver, _key(Kind.B, receiver, micro_batch, target)))
            for target in dict.fromkeys(targets)
        }
        return [next(arrived[target]) for target in targets]


def _key(kind: Kind, stage: int, micro_batch: int, sender: int) -> Key:
    """Return the key of a message to a stage; it names the sender unless that is the adjacent stage."""
    adjacent = stage - 1 if kind is Kind.F else stage + 1
    return (kind, stage, micro_batch) if sender == adjacent else (kind, stage, micro_batch, sender)


def _of_leaves(ends: Sequence[int], live: Live) -> list[int]:
    """Return the ends of the values that require a gradient."""
    pairs = zip(ends, live.tensors, strict=True)
    return [end for end, value in pairs if value is not None and value.requires_grad]


def _grouped(ends: Sequence[int], values: Sequence[Any]) -> dict[int, list[Any]]:
    """Return the values of each end, in order."""
    groups: defaultdict[int, list[Any]] = defaultdict(list)
    for end, value in zip(ends, values, strict=True):
        groups[end].append(value)
    return groups
