"""What one run measures of itself: start and end of each action and message, on the clocks of their devices.

::

    worker      take ── start ══ compute ══ end ── send            a wait is idle time, and so is the runtime's own
    messages                                        sent ── arrived ── taken, when its action starts

A CPU has the clock of the host. An accelerator runs behind the host, so there events on its stream take the times; they
are read when somebody asks, and brought to the host's clock then: within some 20 µs, and within what the two clocks
drift apart until then, microseconds in each second.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch.autograd import profiler
from torch.utils import _pytree as pytree

from schedules import Action, Kind, Schedule, Timeline, Transfer

from .mailbox import Key
from .post import Post
from .stage import Stage
from .streams import has_streams

_ANCHORS = 5
_NOTHING = nullcontext()


class Recorder:
    """The times of one run, taken by the workers of its devices.

    Args:
        schedule: the actions.
        stages: those that it has.
    """

    def __init__(self, schedule: Schedule, stages: Sequence[Stage]) -> None:
        self.schedule = schedule
        self.clocks: list[_HostClock | _EventClock] = [
            _EventClock(device) if has_streams(device) else _HostClock()
            for device in _homes(schedule, stages)
        ]
        self._sent: dict[Key, _Sent] = {}
        self._taken: list[tuple[Key, _Sent, int, float, Any]] = []

    def sent(self, sender: int, receiver: int, key: Key, message: Any) -> None:
        """A message leaves a stage for one on another device."""
        mark = self.clocks[self.schedule.device_of[sender]].now()
        self._sent[key] = sender, mark, time.perf_counter(), _bytes(message)

    def taken(self, receiver: int, key: Key, since: float) -> None:
        """A stage has a message for which it has waited since then."""
        sent = self._sent.pop(key, None)
        if sent is not None:
            mark = self.clocks[self.schedule.device_of[receiver]].now()
            self._taken.append((key, sent, receiver, since, mark))

    @cached_property
    def timeline(self) -> Timeline:
        """The run, from 0 on; waits for the devices that still are at it."""
        rows = [clock.spans() for clock in self.clocks]
        origin = min(start for starts, _ in rows for start in starts)
        transfers = [self._transfer(origin, *each) for each in self._taken]
        return Timeline(
            self.schedule,
            starts=[[start - origin for start in starts] for starts, _ in rows],
            ends=[[end - origin for end in ends] for _, ends in rows],
            transfers=tuple(sorted(transfers, key=attrgetter("start"))),
        )

    def _transfer(
        self, origin: float, key: Key, sent: _Sent, receiver: int, since: float, mark: Any
    ) -> Transfer:
        sender, left, left_host, size = sent
        home = self.schedule.device_of
        start = self.clocks[home[sender]].seconds(left)
        end = self.clocks[home[receiver]].seconds(mark)
        if isinstance(self.clocks[home[receiver]], _HostClock) and since >= left_host:
            end = start  # it lay there when it was asked for
        return Transfer(
            kind=_kind(key),
            source=sender,
            target=receiver,
            micro_batch=_micro_batch(key),
            start=start - origin,
            end=max(start, end) - origin,
            bytes=size,
        )


class Watch:
    """Sees what each action computes, and each message: for a recorder, a profiler, or both.

    Args:
        schedule: the actions.
        stages: those that it has.
        recorder: takes the times; None if nobody asks for them.
    """

    def __init__(self, schedule: Schedule, stages: Sequence[Stage], recorder: Recorder | None) -> None:
        self.recorder = recorder
        self.device_of = schedule.device_of
        self._clocks: Sequence[AbstractContextManager[object]] = (
            recorder.clocks if recorder else [_NOTHING] * schedule.devices
        )
        self._profiled = profiling()
        self._nvtx = any(stage.device.type == "cuda" for stage in stages)

    @classmethod
    def wanted(cls, schedule: Schedule, stages: Sequence[Stage], recorder: Recorder | None) -> Watch | None:
        """One for a run; None where nobody would see what it sees."""
        return cls(schedule, stages, recorder) if recorder or profiling() else None

    def computing(self, action: Action) -> AbstractContextManager[object]:
        """Around what an action computes, when it has its input and before it sends."""
        clock = self._clocks[self.device_of[action.stage]]
        return self.named(str(action), clock) if self._profiled or self._nvtx else clock

    def sending(self, receiver: int, key: Key) -> AbstractContextManager[object]:
        """Around a message that is handed over to another device."""
        return self.named(f"send {_label(receiver, key)}") if self._profiled or self._nvtx else _NOTHING

    def taking(self, receiver: int, key: Key) -> AbstractContextManager[object]:
        """Around the wait for a message."""
        return self.named(f"take {_label(receiver, key)}") if self._profiled or self._nvtx else _NOTHING

    @contextmanager
    def named(self, name: str, inner: AbstractContextManager[object] = _NOTHING) -> Iterator[None]:
        """A range of that name in torch.profiler, if it is at work, and in Nsight on CUDA devices."""
        with profiler.record_function(f"pipepart {name}") if self._profiled else _NOTHING:
            if not self._nvtx:
                with inner:
                    yield
                return
            torch.cuda.nvtx.range_push(f"pipepart {name}")
            try:
                with inner:
                    yield
            finally:
                torch.cuda.nvtx.range_pop()


def profiling() -> bool:
    """Whether a profiler of torch is at work, on this thread or on all."""
    return profiler._is_profiler_enabled


class WatchedPost(Post):
    """A post whose messages a watch sees where they go from one device to another."""

    def __init__(self, post: Post, watch: Watch) -> None:
        self._post = post
        self._watch = watch

    def put(self, sender: int, receiver: int, key: Key, message: Any) -> None:
        """As without a watch."""
        home = self._watch.device_of
        if home[sender] == home[receiver] or message is None:
            self._post.put(sender, receiver, key, message)
            return
        with self._watch.sending(receiver, key):
            if self._watch.recorder:
                self._watch.recorder.sent(sender, receiver, key, message)
            self._post.put(sender, receiver, key, message)

    def take(self, receiver: int, key: Key) -> Any:
        """As without a watch."""
        since = time.perf_counter()
        with self._watch.taking(receiver, key):
            message = self._post.take(receiver, key)
        if self._watch.recorder:
            self._watch.recorder.taken(receiver, key, since)
        return message

    def stop(self) -> None:
        """Wakes whoever waits, now or later."""
        self._post.stop()

    def forget(self) -> None:
        """Lets go of what was not taken."""
        self._post.forget()


_Sent = tuple[int, Any, float, int]  # sender, its clock, the host's, bytes


class _HostClock(AbstractContextManager[object]):
    """Takes the start and the end of each block, and single marks; used by the worker of its device."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []

    def __enter__(self) -> None:
        self._starts.append(time.perf_counter())

    def __exit__(self, *error: object) -> None:
        self._ends.append(time.perf_counter())

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, mark: float) -> float:
        """When that was, on the host's clock."""
        return mark

    def spans(self) -> tuple[list[float], list[float]]:
        return self._starts, self._ends


class _EventClock(AbstractContextManager[object]):
    """The same by events on the stream that the worker is on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._starts: list[torch.Event] = []
        self._ends: list[torch.Event] = []

    def __enter__(self) -> None:
        self._starts.append(self.now())

    def __exit__(self, *error: object) -> None:
        self._ends.append(self.now())

    def now(self) -> torch.Event:
        return _recorded(torch.accelerator.current_stream(self._device))

    def seconds(self, mark: torch.Event) -> float:
        first, at = self._anchor
        mark.synchronize()
        return at + first.elapsed_time(mark) / 1e3

    def spans(self) -> tuple[list[float], list[float]]:
        return [self.seconds(each) for each in self._starts], [self.seconds(each) for each in self._ends]

    @cached_property
    def _anchor(self) -> tuple[torch.Event, float]:
        """The first event, and when it was on the host's clock: by another one that the host sees come and go."""
        first = self._starts[0]
        first.synchronize()
        stream = torch.Stream(device=self._device)  # with nothing on it that could hold the event up
        seen = []
        for _ in range(_ANCHORS):
            before = time.perf_counter()
            event = _recorded(stream)
            event.synchronize()
            after = time.perf_counter()
            seen.append((after - before, (before + after) / 2, event))
        _, at, event = min(seen, key=lambda each: each[0])
        return first, at - first.elapsed_time(event) / 1e3


def _homes(schedule: Schedule, stages: Sequence[Stage]) -> list[torch.device]:
    """The device of each row of the schedule."""
    of = dict(zip(schedule.device_of, (stage.device for stage in stages), strict=True))
    return [of[row] for row in range(schedule.devices)]


def _recorded(stream: torch.Stream) -> torch.Event:
    event = torch.Event(device=stream.device, enable_timing=True)
    event.record(stream)
    return event


def _bytes(message: Any) -> int:
    if type(message) is torch.Tensor:
        return message.nbytes
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(message) if isinstance(leaf, torch.Tensor))


def _label(receiver: int, key: Key) -> str:
    """The action that a message is for."""
    return str(Action(_kind(key), receiver, _micro_batch(key)))


def _kind(key: Key) -> Kind:
    """Of what a message carries: a gradient, unless it says otherwise."""
    return key[0] if key[0] in (Kind.F, Kind.REDUCE_GRAD) and isinstance(key[0], Kind) else Kind.B


def _micro_batch(key: Key) -> int | None:
    return None if key[0] is Kind.REDUCE_GRAD else key[2]
