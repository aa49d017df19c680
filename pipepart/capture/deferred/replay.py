"""Replays the log of a construction for some of its memories, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..recorded.refusal import CaptureError
from .log import Constant, Entry, GeneratorRef, Log, Operation, Seeding, View

Deliver = Callable[[int, torch.UntypedStorage], None]


def replay(log: Log, wanted: Collection[int], deliver: Deliver) -> None:
    """Compute the values of some memories as the plain construction does, bit for bit.

    Runs the operations that the wanted values need. Draws for other memories go to a scratch memory, as they move the
    generators. The states of all generators are those of before afterwards.

    Args:
        log: of the construction.
        wanted: numbers of memories.
        deliver: called with the number of each wanted memory and a host storage with its values, as soon as they are
            final. The storage is the receiver's.

    Raises:
        CaptureError: the values depend on an array of numpy, which has changed.
    """
    slice_ = _Slice.of(log, wanted)
    run = _Replay(log, slice_)
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        _disable_current_modes(),
        torch._C._DisableAutocast(),
        torch._C.DisableTorchFunction(),
        _states_kept(log),
    ):
        for position in range(slice_.end):
            run.step(position)
            for number in slice_.finished.get(position, ()):
                if number in slice_.wanted:
                    deliver(number, run.take(number))
                else:
                    run.take(number)
        for number in slice_.untouched:  # of torch.empty, without values in the plain construction, too
            deliver(number, run.take(number))


class _Slice(NamedTuple):
    """The part of a log that some memories need.

    Attributes:
        needed: positions of the entries that run.
        finished: the memories that no later entry of these needs, by position.
        end: the position after the last entry that runs.
        kept: the draws after which a generator's state is needed later.
    """

    wanted: frozenset[int]
    needed: frozenset[int]
    finished: dict[int, list[int]]
    untouched: tuple[int, ...]
    end: int
    kept: frozenset[int]

    @classmethod
    def of(cls, log: Log, wanted: Collection[int]) -> _Slice:
        open_, needed, last = set(wanted), set[int](), dict[int, int]()
        draws = False  # a later entry draws, so it depends on how much the earlier ones have drawn
        for position in reversed(range(len(log.entries))):
            entry = log.entries[position]
            if isinstance(entry, Seeding):
                continue
            reads, writes, kills = _effects(entry)
            if writes.isdisjoint(open_) and not (draws and _draws(entry) and not entry.fills):
                continue
            needed.add(position)
            draws = draws or _draws(entry)
            open_ = (open_ - kills) | reads
            for number in reads | writes:
                last.setdefault(number, position)
        finished: dict[int, list[int]] = {}
        for number, position in last.items():
            finished.setdefault(position, []).append(number)
        kept = {e.state for e in log.entries if isinstance(e, Seeding) and isinstance(e.state, int)}
        return cls(
            frozenset(wanted),
            frozenset(needed),
            finished,
            tuple(sorted(set(wanted) - last.keys())),
            max(needed, default=-1) + 1,
            frozenset(kept),
        )


class _Replay:
    """The memories and generators of one replay."""

    def __init__(self, log: Log, slice_: _Slice) -> None:
        self._log = log
        self._slice = slice_
        self._memories: dict[int, torch.UntypedStorage] = {}
        self._generators = [log.generators[0], *(torch.Generator() for _ in log.generators[1:])]
        self._states: dict[int, Tensor] = {}
        self._last_draw = max((p for p in slice_.needed if _draws(log.entries[p])), default=-1)
        self._scratch = torch.UntypedStorage(0)

    def step(self, position: int) -> None:
        """Run one entry, if it is needed or draws."""
        entry = self._log.entries[position]
        if isinstance(entry, Seeding):
            self._seed(entry, position)
        elif position in self._slice.needed:
            if isinstance(entry, Constant):
                if entry.view.memory in self._slice.wanted and entry.changed:
                    raise CaptureError(
                        "a tensor of the model shares the memory of a numpy array that was changed after the tensor "
                        "was made: copy it, torch.tensor(array)"
                    )
                entry.view.on(self._memory(entry.view.memory)).copy_(entry.data)
            else:
                self._keep(entry, self._run(entry, self._memory))
        elif _draws(entry) and position < self._last_draw:
            self._run(entry, self._scratch_for)
        if position in self._slice.kept and _draws(entry):
            assert entry.generator is not None
            self._states[position] = self._generators[entry.generator].get_state()

    def take(self, number: int) -> torch.UntypedStorage:
        """Return a memory and forget it."""
        self._memory(number)
        return self._memories.pop(number)

    def _seed(self, entry: Seeding, position: int) -> None:
        if position < self._last_draw:
            state = self._states[entry.state] if isinstance(entry.state, int) else entry.state
            self._generators[entry.generator].set_state(state)

    def _run(self, entry: Operation, memory: Callable[[int], torch.UntypedStorage]) -> Any:
        def filled(leaf: Any) -> Any:
            if isinstance(leaf, View):
                return leaf.on(memory(leaf.memory))
            return self._generators[leaf.number] if isinstance(leaf, GeneratorRef) else leaf

        args, kwargs = pytree.tree_map(filled, (entry.args, entry.kwargs), is_leaf=_is_leaf)
        try:
            return entry.func(*args, **kwargs)
        except Exception as error:
            error.add_note("pipepart: in an operation of the model's constructor, while it was replayed")
            raise

    def _keep(self, entry: Operation, result: Any) -> None:
        """Take over the memories that an operation made, laid out as on the meta device."""
        leaves = pytree.tree_leaves(result)
        for place, view in entry.made:
            leaf = leaves[place]
            storage = leaf.untyped_storage()
            same = view == View.of(leaf, view.memory) and storage.nbytes() == self._log.sizes[view.memory]
            if same and view.memory not in self._memories:
                self._memories[view.memory] = storage
            else:
                if (leaf.shape, leaf.dtype) != (view.size, view.dtype):
                    raise CaptureError(
                        f"{entry.func} makes {leaf.dtype} {tuple(leaf.shape)} on the CPU and {view.dtype} {view.size} "
                        "on the meta device, so this construction cannot be deferred"
                    )
                view.on(self._memory(view.memory)).copy_(leaf)

    def _memory(self, number: int) -> torch.UntypedStorage:
        if number not in self._memories:
            self._memories[number] = torch.UntypedStorage(self._log.sizes[number])
        return self._memories[number]

    def _scratch_for(self, number: int) -> torch.UntypedStorage:
        if self._scratch.nbytes() < self._log.sizes[number]:
            self._scratch = torch.UntypedStorage(self._log.sizes[number])
        return self._scratch


def _effects(entry: Operation | Constant) -> tuple[frozenset[int], frozenset[int], frozenset[int]]:
    """Return the memories that an entry reads, writes, and writes without needing their earlier values."""
    if isinstance(entry, Constant):
        written = frozenset((entry.view.memory,))
        return frozenset(), written, written
    return entry.reads, entry.writes, entry.kills


def _draws(entry: Entry) -> TypeGuard[Operation]:
    return isinstance(entry, Operation) and entry.generator is not None


def _is_leaf(leaf: Any) -> bool:
    return isinstance(leaf, View | GeneratorRef)


@contextmanager
def _states_kept(log: Log) -> Iterator[None]:
    default = log.generators[0]
    state = default.get_state()
    try:
        yield
    finally:
        default.set_state(state)
