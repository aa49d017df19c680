"""Recording: the calls of one forward, and their assignment to the layers of a chain.

::

    calls      arange  embed  add  block.0  mul  block.1  norm  head | view  cross_entropy
    layers     └── embed ──┘  └─ block.0 ┘  └ block.1 ┘    ...       | the loss
                            live ▶        live ▶                     |

A layer runs one whole module and the functions before it. Between two layers go the live values: what an earlier layer
made and a later one needs. What follows the last module and takes no parameter is the model's own loss, if it returns
one; otherwise it belongs to the last layer.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..refusal import CaptureError
from .calls import HOOKS, Autocast, Call, as_text, is_plain_function
from .given import Env, Reading, Ref, resolved
from .layer_order import layers_of
from .outputs import own_loss
from .subgraph import Subgraph


class Part(NamedTuple):
    """The calls of one layer in a recording, or of the loss after the last layer.

    Attributes:
        takes, gives: the numbers of the live values before and behind it.
        calls: to replay.
        state: number, path of the module and name of each parameter and buffer that the calls use.
        constants: the numbers of the model's other tensors that they use.
        placed: whether they name a device or use constants, which must be on the device of the layer.
    """

    takes: tuple[int, ...]
    gives: tuple[int, ...]
    calls: tuple[Call, ...]
    state: tuple[tuple[int, str, str], ...] = ()
    constants: tuple[int, ...] = ()
    placed: bool = False


class Group(NamedTuple):
    """The modules and tensors used by the calls up to and including a whole module; one layer of the finest chain.

    Attributes:
        modules: paths of the whole modules that it calls, in order, behind those that it may call for other arguments.
        tensors: paths of the parameters and buffers that its other calls use.
    """

    modules: tuple[str, ...]
    tensors: tuple[str, ...]


@dataclass(eq=False)
class Recording:
    """One forward of a model.

    Attributes:
        calls: in order, without those whose result nobody needs.
        inputs: the number of each tensor among the model's arguments, in the order of their nest.
        state: path of each parameter and buffer that is used, by its number.
        constants: other tensors that the model holds, by their numbers.
        output, output_spec: what the model returned, with refs in place of tensors.
        joined: ranges ``(first, last)`` of calls that must be in one layer, because of writes into shared memory.
        scalars: the numbers of the tensors in the output that may be a loss.
        autocast: the state around the forward.
        loss: the number of the loss that the model returned; None if it is not split off.
        parts: of the layers, in their order; set by :meth:`arrange`.
        end: what follows the last layer: the loss, and the outputs beside it.
        end_inputs: which arguments the end needs, as numbers.
        devices: of the model and its arguments while it was recorded; a replay uses that of the stage instead.
        ends: the end as it would be recorded for a mini-batch of so many samples; None if it would be another one.
        attributes: modules, names and keys of the attributes that the code has read by names that are not in it.
        result: what the model returned, until a replay has been compared with it.
        uses: how often micro-batches of a call or step went its way.
    """

    calls: list[Call]
    inputs: list[int]
    state: dict[int, str]
    constants: dict[int, Tensor]
    output: list[Any]
    output_spec: Any
    joined: list[tuple[int, int]]
    autocast: Autocast
    devices: frozenset[torch.device] = frozenset()
    scalars: frozenset[int] = frozenset()
    loss: int | None = None
    parts: list[Part] = field(default_factory=list)
    end: Part = field(default_factory=lambda: Part((), (), ()))
    end_inputs: tuple[int, ...] = ()
    ends: dict[int, Part | None] = field(default_factory=dict)
    attributes: list[tuple[nn.Module, str, Hashable]] = field(default_factory=list)
    result: Any = None
    uses: int = 0

    def __str__(self) -> str:
        """Return a table of the calls: what each makes, what it is given, and the line of the user's code."""
        lines = [f"inputs {', '.join(f'%{number}' for number in self.inputs)}"]
        lines += [f"%{number} = {path}" for number, path in self.state.items()]
        lines += [str(call) for call in self.calls]
        return "\n".join([*lines, f"returns {', '.join(map(as_text, self.output))}"])

    def groups(self) -> list[Group]:
        """Return the groups of the finest chain: each has the calls up to and including a whole module."""
        ends = [index for index, call in enumerate(self.calls) if call.module]
        ends = [end for end in ends if not any(first <= end < last for first, last in self.joined)]
        result, start = [], 0
        stop = self.start_of_loss
        for end in [*ends[:-1], stop - 1] if ends else [stop - 1]:
            calls = self.calls[start : end + 1]
            modules = tuple(call.module for call in calls if call.module)
            used = {number for call in calls for number in call.given.numbers() if number in self.state}
            used |= self._returned_state if end + 1 == stop else frozenset()
            result.append(Group(modules, tuple(dict.fromkeys(self.state[number] for number in sorted(used)))))
            start = end + 1
        return result

    @property
    def modules(self) -> list[str]:
        """The paths of the whole modules that it calls, in order."""
        return [call.module for call in self.calls if call.module]

    def module_of_loss(self) -> str:
        """Return the path of the whole module that computes the model's own loss; empty if functions do."""
        loss = self._number_of_loss()
        return next((call.module for call in self.calls if loss in call.new), "")

    @property
    def border(self) -> str:
        """Describe the last call of the layers, before the end."""
        call = self.calls[self._end_of_layers() - 1]
        if call.module:
            return f"module {call.module!r}"
        why = (
            "writes in place" if call.writes else "draws random numbers" if call.draws else "uses a parameter"
        )
        return f"{call.name.strip('_')}() at {call.line}, which {why},"

    def settle(self, split_loss: bool) -> None:
        """Split off the model's own loss if ``split_loss``, and drop unused calls."""
        self.loss = self._number_of_loss() if split_loss else None
        self._drop_unused()

    @property
    def start_of_loss(self) -> int:
        """The index of the first call after the layers, if the loss is split off; else the number of calls."""
        return self._end_of_layers() if self.loss is not None else len(self.calls)

    def arrange(self, layers: Sequence[Group]) -> None:
        """Assign the calls to layers.

        Args:
            layers: of the chain, which may have been made from another recording of the model.

        Raises:
            CaptureError: the recording calls other modules, or uses other parameters, than the layers.
        """
        stop = self.start_of_loss
        places = self._places(layers, stop)
        count = len(layers)
        senders = self._senders(layers, places)
        fixed = {*self.state, *self.constants} - senders.keys()
        born = dict.fromkeys(self.inputs, -1) | senders
        last: dict[int, int] = {}
        for call, place in zip(self.calls, places, strict=True):
            for number in call.given.numbers():
                last[number] = max(last.get(number, -1), place)
            for number in call.new:
                born[number] = place
        for number in self._results:
            last[number] = count if self.loss is not None else max(last.get(number, -1), count - 1)
        carried = {number for number in last if number not in fixed}
        arguments = {number for number in self.inputs if last.get(number) == count}
        for number in arguments:  # the end gets them from the caller, not through the stages
            uses = [
                p
                for c, p in zip(self.calls, places, strict=True)
                if p < count and number in c.given.numbers()
            ]
            last[number] = max(uses, default=-1)
        self.end_inputs = tuple(sorted(arguments))
        live = [
            tuple(sorted(number for number in carried if born[number] < index <= last[number]))
            for index in range(count + 1)
        ]
        calls_here = [
            tuple(call for call, place in zip(self.calls, places, strict=True) if place == index)
            for index in range(count + 1)
        ]
        if self.loss is not None:
            live[count] = tuple(sorted({*live[count], *self._returned_state}))
        results = self._results
        of_last = results if self.loss is None else self._returned_state
        self.parts = [
            self._part(live[i], live[i + 1], calls_here[i], of_last if i == count - 1 else ())
            for i in range(count)
        ]
        self.end = self._part(live[count], (), calls_here[count], results - self._returned_state)

    def completed(self, env: Env, loss: Any = None) -> Any:
        """Return the output of the model, built from the tensors of a replay.

        Args:
            env: the tensors by their numbers.
            loss: what takes the place of the model's own loss; None for the loss itself.
        """
        leaves = [
            loss if loss is not None and type(out) is Ref and out.number == self.loss else resolved(out, env)
            for out in self.output
        ]
        return pytree.tree_unflatten(leaves, self.output_spec)

    @cached_property
    def _results(self) -> frozenset[int]:
        """The numbers of the tensors that the model returned, and of those from which it read numbers that it did."""
        return frozenset(out.number for out in self.output if type(out) in (Ref, Reading))

    @cached_property
    def touched(self) -> dict[int, list[int]]:
        """Map each live value to the layers that produce or use it, in order. Arguments of the model enter at layer 0.

        The end counts as the last layer, which makes its input. Known once the layers are arranged.
        """
        live = {number for part in self.parts for number in (*part.takes, *part.gives)}
        places: dict[int, list[int]] = {number: [0] for number in self.inputs if number in live}
        for index, part in enumerate(self.parts):
            numbers = {number for call in part.calls for number in (*call.given.numbers(), *call.new)}
            numbers |= {number for number, *_ in part.state}
            if part is self.parts[-1]:
                numbers |= {*self.end.takes, *part.takes}
            for number in sorted(numbers & live):
                layers = places.setdefault(number, [])
                layers += [] if layers[-1:] == [index] else [index]
        return places

    @property
    def _returned_state(self) -> frozenset[int]:
        """The parameters and buffers that the model returns, which the last layer passes on."""
        return frozenset(out.number for out in self.output if type(out) is Ref and out.number in self.state)

    @property
    def hooks(self) -> bool:
        """True if functions register hooks on tensors, which need gradients."""
        return any(call.name in HOOKS for call in self.calls)

    @cached_property
    def questions(self) -> list[Call]:
        """Return the calls that read values computable from the arguments alone, with the calls that they need."""
        written = {number for call in self.calls for number in call.writes}
        calls: set[Call] = set()
        for index, call in enumerate(self.calls):
            if call.reads and call.asked:
                needed = Subgraph.of(call.given.numbers(), self.calls[:index])
                if needed.is_pure(written) and is_plain_function(call):
                    calls.update((*needed.calls, call))
        return [call for call in self.calls if call in calls]

    def _drop_unused(self) -> None:
        """Drop calls whose results nobody needs and that write nothing."""
        needed = set(self._results)
        kept = []
        for index in reversed(range(len(self.calls))):
            call = self.calls[index]
            if call.acts or (call.reads and call.asked) or not needed.isdisjoint(call.made):
                kept.append(index)
                needed.update(call.given.numbers())
        kept.reverse()
        place = {index: number for number, index in enumerate(kept)}
        self.joined = [
            (place[first], place[last]) for first, last in self.joined if first in place and last in place
        ]
        self.calls = [self.calls[index] for index in kept]

    def _part(
        self, takes: Iterable[int], gives: Iterable[int], calls: Sequence[Call], results: Iterable[int]
    ) -> Part:
        used = {number for call in calls for number in call.given.numbers()} | {*results, *gives}
        used -= {*takes}
        state = tuple((number, *_split(self.state[number])) for number in sorted(used & self.state.keys()))
        constants = tuple(sorted(used & self.constants.keys()))
        placed = bool(constants) or any(call.given.has_device for call in calls)
        return Part(tuple(takes), tuple(gives), tuple(calls), state, constants, placed)

    def _places(self, layers: Sequence[Group], stop: int) -> list[int]:
        """Return the layer of each call; the number of layers for those of the end."""
        modules = [call.module for call in self.calls[:stop] if call.module]
        of_modules = iter(layers_of(modules, [layer.modules for layer in layers]))
        places: list[int] = []
        waiting = 0
        for call in self.calls[:stop]:
            waiting += 1
            if call.module:
                places += [next(of_modules)] * waiting
                waiting = 0
        places += [len(layers) - 1] * waiting
        return places + [len(layers)] * (len(self.calls) - stop)

    def _senders(self, layers: Sequence[Group], places: Sequence[int]) -> dict[int, int]:
        """Return the layer that sends a parameter or buffer to later ones, for each that a layer uses and has not.

        Raises:
            CaptureError: no earlier layer has it, or it is written.
        """
        result: dict[int, int] = {}
        for number, place, how, written in self._uses_of_state(places, len(layers) - 1):
            path = self.state[number]
            if path in layers[place].tensors:
                continue
            senders = [index for index in range(place) if path in layers[index].tensors]
            if written or not senders:
                where = layers[place].modules[-1:] or ""
                raise CaptureError(
                    f"with these arguments or in this mode the model {how} {path!r} in layer {where}, where it does "
                    "not in the plan: make the plan with a sample for which it does"
                )
            result[number] = senders[0]
        return result

    def _uses_of_state(self, places: Sequence[int], last: int) -> Iterator[tuple[int, int, str, bool]]:
        """Yield number and layer of each use of a parameter or buffer, the use in words, and whether it is written."""
        for call, place in zip(self.calls, places, strict=True):
            for number in self.state.keys() & set(call.given.numbers()):
                if place <= last:
                    written = number in call.writes
                    yield number, place, f"{'writes' if written else 'uses'}, at {call.line},", written
        for number in self._returned_state:
            yield number, last, "returns", False

    def _end_of_layers(self) -> int:
        """Return the index of the first call of the end, which has no modules, parameters, draws or writes."""
        stop = len(self.calls)
        while stop and is_plain_function(self.calls[stop - 1]):
            if any(number in self.state for number in self.calls[stop - 1].given.numbers()):
                break
            stop -= 1
        return stop

    def _number_of_loss(self) -> int | None:
        """Return the number of the loss that the model returns; None if it returns none."""

        def is_scalar(leaf: Any) -> bool:
            return isinstance(leaf, Ref) and leaf.number in self.scalars

        marks = pytree.tree_unflatten(self.output, self.output_spec)
        mark = own_loss(marks, is_scalar)
        return mark.number if is_scalar(mark) else None


def _split(path: str) -> tuple[str, str]:
    owner, _, name = path.rpartition(".")
    return owner, name
