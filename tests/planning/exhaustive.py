"""An oracle for tiny problems: the shortest step over all placements of layers and all orders of their actions.

Every layer is a stage of its own. A coarser cut gains nothing: its actions can follow each other here, too. Micro-
batches are alike, so each layer may run them in their order.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_EPSILON = 1e-9


@dataclass(frozen=True)
class Tiny:
    """Seconds of one micro-batch: of each layer, and of the transfer behind it. A device of speed 2 takes half."""

    forward: Sequence[float]
    backward_input: Sequence[float]
    backward_weight: Sequence[float]
    transfer: Sequence[int]
    speeds: Sequence[float]
    micro_batches: int
    saved: Sequence[int]
    memory: float = math.inf

    @property
    def layers(self) -> int:
        return len(self.forward)


def shortest_step(tiny: Tiny, below: float) -> float | None:
    """Return the shortest step of at most ``below`` seconds; None if there is none."""
    best = None
    alike = len(set(tiny.speeds)) == 1
    for homes in itertools.product(range(len(tiny.speeds)), repeat=tiny.layers):
        if alike and any(home > max(homes[:at], default=-1) + 1 for at, home in enumerate(homes)):
            continue  # the same up to names
        found = _shortest(tiny, homes, below)
        if found is not None:
            best, below = found, found - 2 * _EPSILON
    return best


@dataclass(frozen=True)
class _State:
    """How many micro-batches each stream has begun, when each device is free, when inputs arrive, what links carry."""

    done: tuple[int, ...]
    free: tuple[float, ...]
    ready: tuple[tuple[float, ...], ...]  # of each stream, the arrivals that are not used yet
    links: tuple[tuple[tuple[int, int], float], ...]
    now: float  # the last start: actions are drawn in the order of their starts


def _shortest(tiny: Tiny, homes: Sequence[int], below: float) -> float | None:
    """Play all orders, action after action, and drop a state if another one is nowhere later."""
    n, m = tiny.layers, tiny.micro_batches
    seconds = [
        value / tiny.speeds[homes[layer]]
        for kind in (tiny.forward, tiny.backward_input, tiny.backward_weight)
        for layer, value in enumerate(kind)
    ]
    ready = ((0.0,) * m, *[()] * (3 * n - 1))
    states = [_State((0,) * (3 * n), (0.0,) * len(tiny.speeds), ready, (), 0.0)]
    for _ in range(3 * n * m):
        following: dict[tuple[int, ...], list[_State]] = {}
        for state in states:
            for made in _next_states(tiny, homes, seconds, state):
                if _at_least(homes, seconds, made, m) <= below + _EPSILON:
                    _keep(following.setdefault(made.done, []), made)
        states = list(itertools.chain.from_iterable(following.values()))
    return min((max(state.free) for state in states), default=None)


def _next_states(
    tiny: Tiny, homes: Sequence[int], seconds: Sequence[float], state: _State
) -> Iterator[_State]:
    n = tiny.layers
    for stream in range(3 * n):
        if not state.ready[stream]:
            continue
        kind, layer = divmod(stream, n)
        home = homes[layer]
        start = max(state.free[home], state.ready[stream][0])
        if start < state.now - _EPSILON or (kind == 0 and not _fits(tiny, homes, state, layer)):
            continue
        end = start + seconds[stream]
        ready = list(state.ready)
        ready[stream] = ready[stream][1:]
        links = dict(state.links)
        for target in _targets(stream, n):
            arrival, other = end, homes[target % n]
            if other != home:
                carried = tiny.transfer[min(layer, target % n)]
                leaves = max(end, links.get((home, other), 0.0))
                arrival = leaves + carried
                if carried:
                    links[home, other] = arrival
            ready[target] = (*ready[target], arrival)
        done = (*state.done[:stream], state.done[stream] + 1, *state.done[stream + 1 :])
        free = (*state.free[:home], end, *state.free[home + 1 :])
        yield _State(done, free, tuple(ready), tuple(sorted(links.items())), start)


def _targets(stream: int, n: int) -> list[int]:
    kind, layer = divmod(stream, n)
    if kind == 0:
        return [stream + 1] if layer + 1 < n else [stream + n]
    if kind == 1:
        return [stream + n, *([stream - 1] if layer else [])]
    return []


def _fits(tiny: Tiny, homes: Sequence[int], state: _State, layer: int) -> bool:
    """Whether the device has memory for one more micro-batch of a layer; W frees it."""
    n = tiny.layers
    used = sum(
        tiny.saved[at] * (state.done[at] - state.done[2 * n + at])
        for at in range(n)
        if homes[at] == homes[layer]
    )
    return used + tiny.saved[layer] <= tiny.memory


def _at_least(homes: Sequence[int], seconds: Sequence[float], state: _State, m: int) -> float:
    """A bound: each device still has its work to do, and the oldest forward its way to the end and back."""
    n = len(homes)
    left = list(state.free)
    for stream, count in enumerate(state.done):
        left[homes[stream % n]] += seconds[stream] * (m - count)
    found = max(left)
    for stream, arrivals in enumerate(state.ready):
        if arrivals:
            kind, layer = divmod(stream, n)
            way = range(layer, n) if kind == 0 else ()
            back = range(n) if kind == 0 else range(layer + 1) if kind == 1 else ()
            trip = sum(seconds[at] for at in way) + sum(seconds[n + at] for at in back)
            found = max(found, arrivals[-1] + trip + seconds[2 * n if kind < 2 else stream])
    return found


def _keep(states: list[_State], made: _State) -> None:
    """Add a state unless another one is nowhere later; drop those that are nowhere earlier."""
    mine = _times(made)
    kept = []
    for state in states:
        its = _times(state)
        if all(a <= b + _EPSILON for a, b in zip(its, mine, strict=True)):
            return
        if not all(a <= b + _EPSILON for a, b in zip(mine, its, strict=True)):
            kept.append(state)
    states[:] = [*kept, made]


def _times(state: _State) -> list[float]:
    links = dict(state.links)
    devices = range(len(state.free))
    return [
        state.now,
        *state.free,
        *itertools.chain.from_iterable(state.ready),
        *(links.get((one, other), 0.0) for one in devices for other in devices),
    ]
