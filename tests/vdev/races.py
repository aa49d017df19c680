"""Finds data races, memory accesses not ordered by an event, a stream or the host, in the trace of one run.

A vector clock for each stream says what of each other stream is over when its next kernel begins; one for each host
says what that has waited for. A kernel races with the earlier accesses of the same bytes that are not in its stream's
clock, if either of the two writes. So a run is judged for all orders of the device that its launches permit, whatever
the order was. Memory is judged as if the allocator handed out any free block of a stream for the next allocation there.

A host is a thread; on a thread of autograd, each call of its engine is a host of its own, as only that thread orders
them. Launches of several hosts on one stream count in the order that was seen.

    with hosts.tracked():
        pipe = Pipeline(...)
        with races.refused():
            pipe.step(x, target=y)
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tests.vdev import devices, hosts

Stream = tuple[int, int]  # device, number
Clock = dict[Stream | int, int]  # counts of streams, and of hosts by their number

ALL = 1 << 62  # beyond the last byte of any block
UNORDERED = "two streams use memory, and nothing orders them"
NOT_YET = "a stream uses memory that the stream of its allocation may not have reached"
STILL_USED = "memory is handed out again that a stream may still use"
ON_HOST = "the host uses pinned memory that a stream may still use"


class Record(NamedTuple):
    """One entry of the trace, as the backend gives it."""

    kind: str
    stream: Stream | None
    other: Stream | None
    object: int  # an event, a block, a device, a call, or a put
    name: str
    accesses: list[tuple[int, int, int, bool]]  # block, first byte, byte after the last, whether it writes
    host: int
    thread: int
    forward_thread: int  # with the next: which forward a node is of, or which node a forward has made
    forward_number: int
    node: str


class Access(NamedTuple):
    """A use of bytes of a block by a stream."""

    stream: Stream
    at: int  # the count of the stream
    start: int
    stop: int
    writes: bool
    record: int

    def conflicts(self, start: int, stop: int, writes: bool) -> bool:
        """Return True if it overlaps with these bytes and either writes."""
        return (writes or self.writes) and self.start < stop and start < self.stop


@dataclass
class Block:
    """Memory from its allocation to its free."""

    accesses: list[Access]  # those that a later one may race with
    # The clock of the host that allocated it. What that knows to be allocated before is other memory.
    born: Clock = field(default_factory=dict)
    users: set[Stream] = field(default_factory=set)  # the streams that ``record_stream`` named
    before: list[Access] = field(default_factory=list)  # of freed blocks whose memory this may be
    first: dict[Stream, tuple[Clock, int]] = field(
        default_factory=dict
    )  # its clock and record at its first use


class Found(NamedTuple):
    """Two records that race."""

    kind: str
    first: int
    second: int


def _join(clock: Clock, other: Clock) -> None:
    for key, count in other.items():
        if clock.get(key, 0) < count:
            clock[key] = count


def _is_over(access: Access, clock: Clock) -> bool:
    return clock.get(access.stream, 0) >= access.at


class Detector:
    """Judges the records of a trace in their order."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records
        self._streams: defaultdict[Stream, Clock] = defaultdict(dict)
        self._hosts: defaultdict[int, Clock] = defaultdict(dict)
        self._events: dict[int, Clock] = {}
        self._told: dict[tuple[str, int], Clock] = {}  # what the host of a put or call knew, by its number
        self._joined: defaultdict[int, list[int]] = defaultdict(list)  # by call, the hosts that run its nodes
        self._blocks: dict[int, Block] = {}
        self._freed: defaultdict[Stream, list[Access]] = defaultdict(list)
        # By stream and host, in order: allocations and waits, with the count of the host.
        self._made: defaultdict[Stream, defaultdict[int, list[tuple[int, Block]]]]
        self._made = defaultdict(lambda: defaultdict(list))
        self._waits: defaultdict[Stream, defaultdict[int, list[tuple[int, Clock]]]]
        self._waits = defaultdict(lambda: defaultdict(list))
        self.found: dict[tuple[Any, ...], Found] = {}

    def run(self) -> list[Found]:
        """Return the races of all records, one for each pair of operations and streams."""
        for index, record in enumerate(self._records):
            self._judge(index, record)
        return list(self.found.values())

    def _judge(self, index: int, record: Record) -> None:
        host = self._hosts[record.host]
        host[record.host] = host.get(record.host, 0) + 1
        stream, number = record.stream, record.object
        match record.kind:
            case "host waits for event":
                _join(host, self._events.get(number, {}))
            case "host waits for device":
                for other, clock in self._streams.items():
                    if other[0] == number:
                        _join(host, clock)
            case "host":
                self._touch_on_host(index, host, record)
            case "puts" | "calls":
                self._told[record.kind, number] = dict(host)
            case "gets":
                _join(host, self._told.pop(("puts", number), {}))
            case "joins call":
                self._joined[number].append(record.host)
                _join(host, self._told.get(("calls", number), {}))
            case "returns":
                for joined in self._joined[number]:
                    _join(host, self._hosts[joined])
            case _ if stream is not None:
                self._judge_stream(index, record, stream, host)

    def _judge_stream(self, index: int, record: Record, stream: Stream, host: Clock) -> None:
        number = record.object
        match record.kind:
            case "kernel":
                clock = self._tick(stream, host)
                for access in record.accesses:
                    self._touch(index, stream, clock, *access)
            case "record":
                _join(self._streams[stream], host)
                self._events[number] = dict(self._streams[stream])
            case "wait":
                self._wait(record, stream, host, self._events.get(number, {}))
            case "stream waits":
                assert record.other is not None
                self._wait(record, stream, host, self._streams[record.other])
            case "host waits for stream":
                _join(host, self._streams[stream])
            case "alloc":
                clock = self._tick(stream, host)
                left = [access for access in self._freed[stream] if not _is_over(access, clock)]
                self._freed[stream] = left
                made = Access(stream, clock[stream], 0, ALL, True, index)
                block = self._blocks[number] = Block([made], dict(host), before=list(left))
                self._made[stream][record.host].append((host[record.host], block))
            case "use":
                self._block(number).users.add(stream)
            case "free":
                self._free(index, stream, number, host)

    def _block(self, number: int) -> Block:
        """Return a block; one that is pinned, or of before the trace, is new."""
        return self._blocks.setdefault(number, Block([]))

    def _tick(self, stream: Stream, host: Clock) -> Clock:
        clock = self._streams[stream]
        _join(clock, host)
        clock[stream] = clock.get(stream, 0) + 1
        return clock

    def _wait(self, record: Record, stream: Stream, host: Clock, other: Clock) -> None:
        clock = self._tick(stream, host)
        _join(clock, other)
        self._waits[stream][record.host].append((host[record.host], dict(clock)))

    def _touch_on_host(self, index: int, host: Clock, record: Record) -> None:
        for number, start, stop, writes in record.accesses:
            for old in self._block(number).accesses:
                if old.conflicts(start, stop, writes) and not _is_over(old, host):
                    self._report(ON_HOST, old, index)

    def _touch(
        self, index: int, stream: Stream, clock: Clock, number: int, start: int, stop: int, writes: bool
    ) -> None:
        block = self._block(number)
        left = [old for old in block.before if not _is_over(old, clock)]
        for old in left:
            self._report(STILL_USED, old, index)
        if left:
            block.before = []  # reported once
        kept = []
        for old in block.accesses:
            over = _is_over(old, clock)
            if not over and old.record != index and old.conflicts(start, stop, writes):
                self._report(NOT_YET if self._records[old.record].kind == "alloc" else UNORDERED, old, index)
            inside = start <= old.start and old.stop <= stop
            if not (over and inside and (writes or not old.writes)):
                kept.append(old)
        block.accesses = [*kept, Access(stream, clock[stream], start, stop, writes, index)]
        block.first.setdefault(stream, (dict(clock), index))

    def _known_by(self, stream: Stream, host: Clock) -> Clock:
        """Return what a stream waits for in every order of the hosts, by the time that a host has this clock."""
        known: Clock = {stream: self._streams[stream].get(stream, 0)}
        for other, waits in self._waits[stream].items():
            last = next((clock for at, clock in reversed(waits) if host.get(other, 0) >= at), {})
            _join(known, last)
        return known

    def _free(self, index: int, stream: Stream, number: int, host: Clock) -> None:
        block = self._blocks.pop(number, None)
        if block is None:
            return
        over = dict(host)
        for user in block.users:
            _join(over, self._known_by(user, host))
        over[stream] = self._streams[stream].get(stream, 0)  # what is handed out again there is behind
        left = [access for access in block.accesses if not _is_over(access, over)]
        now = self._streams[stream]
        self._freed[stream] += [access for access in left if not _is_over(access, now)]
        # Other hosts may allocate before or after this free. What they have allocated may be this memory too, unless
        # the stream was behind the accesses already.
        known = self._known_by(stream, host)
        left = [access for access in left if not _is_over(access, known)]
        for other, made in self._made[stream].items() if left else ():
            known_before = max(host.get(other, 0), block.born.get(other, 0))
            for at, later in reversed(made):
                if known_before >= at:
                    break
                later.before += left
                for clock, record in later.first.values():
                    for access in left:
                        if not _is_over(access, clock):
                            self._report(STILL_USED, access, record)

    def _report(self, kind: str, old: Access, index: int) -> None:
        one, other = self._records[old.record], self._records[index]
        key = kind, one.name, other.name, one.stream, other.stream, one.node, other.node
        self.found.setdefault(key, Found(kind, old.record, index))


class Race(NamedTuple):
    """Two accesses that nothing orders, and where they are: operations, streams and lines of Python."""

    kind: str
    text: str


class RacesFound(AssertionError):
    """Raised at the end of a block whose devices may race."""

    def __init__(self, races: Sequence[Race]) -> None:
        super().__init__("\n\n".join(f"{race.kind}\n{race.text}" for race in races))


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Raise at the end of the block if two accesses of it have no order, whatever else it has raised."""
    found: list[Race] = []
    try:
        with watched(found):
            yield
    finally:
        if found:
            raise RacesFound(found) from sys.exception()


@contextlib.contextmanager
def watched(found: list[Race]) -> Iterator[None]:
    """Append the races of the block to ``found`` at its end."""
    if not hosts.are_tracked():
        raise RuntimeError(
            "races are found within hosts.tracked() only, and in pipelines that were made there"
        )
    backend = devices._loaded()
    for device in range(backend.device_count()):
        torch.accelerator.synchronize(f"vdev:{device}")
    backend.start_trace(True)
    try:
        yield
    finally:
        backend.stop_trace()
        records = [Record(*one) for one in backend.trace()]
        raw = Detector(records).run()
        found += _described(backend, records, raw)


def _described(backend: Any, records: Sequence[Record], raw: Sequence[Found]) -> list[Race]:
    forwards = {
        (one.forward_thread, one.forward_number): index
        for index, one in enumerate(records)
        if one.kind == "kernel" and not one.node
    }

    def lines(index: int) -> list[str]:
        return [
            f"{file}:{line} {name}"
            for file, name, line in backend.stack(index)
            if "site-packages" not in file and "/lib/python" not in file and not file.startswith("<")
        ]

    def side(index: int) -> str:
        record = records[index]
        # The innermost line first, and for a node of autograd its forward's.
        forward = forwards.get((record.forward_thread, record.forward_number)) if record.node else None
        at = [*lines(index), *([] if forward is None else lines(forward))]
        name = f"{record.name or record.kind}{f' in {record.node}' if record.node else ''}"
        stream = record.stream
        place = "the host" if stream is None else f"stream {stream[1]} of vdev:{stream[0]}"
        return "\n    ".join([f"  {name} on {place}", *at[:6]])

    return [Race(one.kind, f"{side(one.first)}\n{side(one.second)}") for one in raw]
