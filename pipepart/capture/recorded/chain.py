"""RecordedChain: the layers of any module, found by recording its forward once per kind of arguments."""

from __future__ import annotations

import itertools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...input_error import InputError
from ..chain import Chain
from ..sequential import state_of
from .caches import settings_of, without_cache
from .placing import is_on_meta, is_parted
from .python_state.access import ATOMS
from .python_state.surroundings import Surroundings
from .python_state.values import attribute_key, value_key
from .recording.opening import Opening
from .recording.session import record
from .refusal import CaptureError
from .replay.calls import autocast_now
from .replay.comparing import changed, code_of, end_for, samples_of, with_samples
from .replay.given import Arguments, Env
from .replay.layers import BoundCall, held, recorded_layer
from .replay.recording import Group, Recording
from .replay.subgraph import gives_the_same
from .verification import verify

Verify = Literal["first", "never", "always"]

_KEPT = 512  # recordings, at most: each takes about 2 KiB a call
_STATES = 16  # of the surroundings that are remembered, at most


class RecordedChain(Chain):
    """The chain of layers of a model that is no ``nn.Sequential``.

    Args:
        model: the user's.
        groups: what each layer calls, by its name; None to find out by the first recording.
        layers: paths of the modules that are to stay whole, with what stands beside them; None for the children of the
            outermost ModuleLists and Sequentials, of which one that is too coarse to balance stages is opened.
        verify: whether replays are compared with the model, output and gradients: of each recording those in steps
            1, 2, 4, 8, ... ("first"), none, or all.
        split_loss: whether a loss that the model returns is computed after the last layer, to be weighed.

    Attributes:
        opening: which modules stay whole.
        around: returns a context manager within which the model is recorded.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Mapping[str, Group] | None = None,
        *,
        layers: Sequence[str] | None = None,
        verify: Verify = "first",
        split_loss: bool = True,
    ) -> None:
        super().__init__(model, ())
        self.opening = Opening(model, layers) if groups is None else _opening_of(model, groups)
        self._may_open = layers is None and groups is None
        self._surroundings = Surroundings(model)
        self._settings = settings_of(model)
        self._verify = verify
        self._split_loss = split_loss
        self._uses_fakes = False
        self.around: Callable[[], AbstractContextManager[object]] = nullcontext
        self._groups: list[Group] = []
        self._recordings: OrderedDict[Hashable, list[Recording]] = OrderedDict()
        self._states: dict[Hashable, int] = {}
        self._state_numbers = itertools.count()
        self._state: Hashable = None  # that of the last call
        self._around = -1
        self._compared: set[Hashable] = set()  # ways through the model that were compared with it
        self._alike: set[Hashable] = set()  # numbers of samples, and code of losses that is the same for them
        if groups is not None:
            self._set_layers(groups)

    @property
    def entrance(self) -> tuple[str, nn.Module]:
        """The model itself."""
        return "", self.model

    @property
    def places(self) -> list[tuple[str, nn.Module]]:
        """The modules that are recorded as single calls."""
        return [(path, module) for module, path in self.opening.whole.items()]

    @property
    def groups(self) -> dict[str, Group]:
        """Maps the name of each layer to the modules and tensors that it uses."""
        return {name: group for (name, _), group in zip(self.layers, self._groups, strict=True)}

    def use_fake_parameters(self) -> None:
        """Record with fake parameters from now on. Call this in a process that has only some layers of the model.

        In place of a comparison with the model it is recorded twice, to find
        out what changes from forward to forward.

        Raises:
            ValueError: each replay is to be compared with the model.
        """
        if self._verify == "always":
            raise InputError(
                'verify="always" runs the whole model in each step, and each process has only some of its layers: '
                "leave it out, and compare the model and its pipeline in one process, by pipepart.check"
            )
        self._uses_fakes = True

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundCall:
        """Find or make the recording for these arguments.

        Raises:
            CaptureError: the model cannot be recorded with them, or its layers are others than before.
        """
        return self.bind_all([(args, kwargs)])[0]

    def bind_all(self, calls: Sequence[Arguments]) -> list[BoundCall]:
        """Find or make the recordings for the arguments of several calls, as :meth:`bind` does."""
        said = all("use_cache" in kwargs for _, kwargs in calls)
        with self.around(), nullcontext() if said else without_cache(self.model, self._settings):
            return self._bind_all(calls)

    @property
    def _is_without_values(self) -> bool:
        """True if it is recorded with fake parameters."""
        return self._uses_fakes or self._is_on_meta

    @property
    def _is_on_meta(self) -> bool:
        """True if the model has no values; under torchrun it has those of the layers of its rank."""
        return not self._uses_fakes and is_on_meta(self.model)

    def _bind_all(self, calls: Sequence[Arguments]) -> list[BoundCall]:
        state = self._surroundings.state([module for _, module in self.opening.opened()])
        if state is not self._state:
            if len(self._states) >= _STATES:
                self._states.clear()
                warnings.warn(
                    f"{type(self.model).__name__} was recorded for {_STATES} values of what its code can read, last "
                    f"because {self._surroundings.changed} changed: each recording costs two forwards. Pass what "
                    "changes in each step as a tensor, keep it in a buffer, or keep it out of what the model holds",
                    stacklevel=2,
                )
            self._around = self._states.setdefault(state, next(self._state_numbers))  # the state is large
            self._state = state
        around = (
            self._around,
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            autocast_now(),
        )
        flat = [_flattened(call) for call in calls]
        passed = [[leaf for leaf in leaves if isinstance(leaf, Tensor)] for leaves, _ in flat]
        keys = [(_key(*entry), around) for entry in flat]
        recordings = [self._found(*entry) for entry in zip(calls, passed, keys, strict=True)]
        for recording in dict.fromkeys(recordings):
            recording.uses += 1
            mine = [call for call, entry in zip(calls, recordings, strict=True) if entry is recording]
            self._compare(recording, mine)
            recording.result = None
            if recording.loss is not None:
                self._note_end(recording, mine[0], sum(map(samples_of, passed)))
        if self._is_on_meta:
            passed = [[tensor.to("meta") for tensor in mine] for mine in passed]
        return [BoundCall.of(*entry) for entry in zip(recordings, passed, strict=True)]

    def _found(self, call: Arguments, passed: Sequence[Tensor], key: Hashable) -> Recording:
        """Find or make the recording for the arguments of a call."""
        known = self._recordings.setdefault(key, [])
        self._recordings.move_to_end(key)
        match = next((recording for recording in known if self._holds(recording, passed)), None)
        if match is None:
            match = self._recorded(call)
            known.append(match)
            while sum(map(len, self._recordings.values())) > _KEPT:
                self._recordings.popitem(last=False)
        return match

    def _compare(self, recording: Recording, calls: Sequence[Arguments]) -> None:
        """Compare a replay with the model, or the recording with another one: at its uses 1, 2, 4, 8, ...

        At its first use it is compared on the micro-batch that was recorded if others went the same way before or the
        model is parted over devices, at any other use on the last micro-batch.
        """
        always = self._verify == "always"
        if self._verify == "never" or self._is_on_meta:
            return
        if not always and (
            recording.uses & (recording.uses - 1) or (self._uses_fakes and recording.uses > 1)
        ):
            return
        way = tuple([(call.name, call.line, call.grad) for call in recording.calls])
        known_way = not always and recording.uses == 1 and way in self._compared
        as_recorded = known_way or self._uses_fakes or is_parted(self.model)
        for arguments in calls if always else calls[:1] if as_recorded else calls[-1:]:
            if not self._uses_fakes:
                verify(
                    self.model,
                    [layer for _, layer in self.layers],
                    recording,
                    arguments,
                    lambda: self._surroundings.holders(module for _, module in self.opening.opened()),
                    partial(self._again, arguments),
                    known_way,
                )
                recording.result = None  # which is that of the micro-batch that was recorded
            elif not known_way and (why := changed(recording.calls, self._again(arguments).calls)):
                raise CaptureError(f"two recordings of {type(self.model).__name__} differ. {why}")
        self._compared.add(way)

    def _recorded(self, arguments: Arguments) -> Recording:
        recording = self._record(arguments, self.opening)
        while self._split_loss and (path := recording.module_of_loss()) and self.opening.open_loss(path):
            recording = self._record(arguments, self.opening)
        if self._may_open and not self.layers:
            recording = self._opened_further(recording, arguments)
        recording.settle(self._split_loss)
        if not self.layers:
            groups = recording.groups()
            names = _names(groups, self.model)
            groups = _with_unused(groups, self.opening, self.model)
            self._set_layers(dict(zip(names, groups, strict=True)))
        recording.arrange(self._groups)
        return recording

    def _note_end(self, recording: Recording, arguments: Arguments, total: int) -> None:
        """Find what the model's own loss would be recorded as for ``total`` samples, those of the mini-batch.

        It is recorded again with fake parameters, or with those of the model if its code reads values. A loss that was
        the same for ``total`` samples is not recorded again for inputs of other shapes if its numbers are those that it
        had then. A model that takes no more samples is taken at its word.
        """
        if not recording.end.calls or total in recording.ends:
            return
        recording.ends[total] = recording.end
        longer = with_samples(arguments, total)
        if longer is None:
            return
        code = total, code_of(recording.end.calls)
        if code in self._alike:
            return
        for is_fake in dict.fromkeys((True, self._is_without_values)):
            with suppress(Exception):
                other = self._again(longer, is_fake)
                recording.ends[total] = end_for(recording.end, other.calls[other.start_of_loss :])
                break
        if recording.ends[total] is recording.end:
            self._alike.add(code)

    def _again(self, arguments: Arguments, is_fake: bool = False) -> Recording:
        recording = self._record(arguments, self.opening.copy(), is_fake)
        recording.settle(self._split_loss)
        return recording

    def _record(self, arguments: Arguments, opening: Opening, is_fake: bool = False) -> Recording:
        without_values = is_fake or self._is_without_values
        return record(self.model, arguments, opening, self._surroundings, without_values)

    def _opened_further(self, recording: Recording, arguments: Arguments) -> Recording:
        """Open modules that are too coarse to balance stages, one level at a time, as far as that can be recorded."""
        while blocks := self.opening.to_open_next(recording.modules):
            path, why = blocks
            tried = self.opening.copy()
            try:
                if tried.open(path, why, alone=True):
                    recording = self._record(arguments, tried)
                    self.opening = tried
                    continue
            except CaptureError:
                pass
            self.opening.forbid(path)
        return recording

    def _set_layers(self, groups: Mapping[str, Group]) -> None:
        self._groups = list(groups.values())
        self.layers = [
            (name, recorded_layer(index, group, self.model))
            for index, (name, group) in enumerate(groups.items())
        ]

    def _holds(self, recording: Recording, passed: Sequence[Tensor]) -> bool:
        """Ask again what the model read while it was recorded: by names that it computed, and from its arguments."""
        if any(attribute_key(module, name) != key for module, name, key in recording.attributes):
            return False
        if not (questions := recording.questions):
            return True
        env: Env = dict(zip(recording.inputs, passed, strict=True))
        env |= {number: _tensor_at(self.model, path) for number, path in recording.state.items()}
        env |= recording.constants
        return gives_the_same(questions, env)


def _names(groups: Sequence[Group], model: nn.Module) -> list[str]:
    """Name each layer by its last module; a module that is called again gets a number."""
    counts: dict[str, int] = {}
    names = []
    for group in groups:
        path = group.modules[-1] if group.modules else type(model).__name__
        count = counts[path] = counts.get(path, -1) + 1
        names.append(f"{path}@{count}" if count else path)
    return names


def _with_unused(groups: Sequence[Group], opening: Opening, model: nn.Module) -> list[Group]:
    """Add the modules, parameters and buffers that the forward did not use, as it may use them for other arguments.

    A whole module goes to the layer of the module before it in the model: branches of a ModuleDict come to the branch
    that was called. A parameter or buffer beside the whole modules goes to the first layer, which sends it to where it
    is used. A module whose tensors are used in another way than by a call is left out.
    """
    homes = {path: index for index, group in enumerate(groups) for path in group.modules}
    used = {id(_tensor_at(model, path)) for group in groups for path in group.tensors}
    used |= {id(tensor) for path in homes for tensor in state_of(model.get_submodule(path))}
    added: list[list[str]] = [[] for _ in groups]
    place = 0
    for path, module in model.named_modules():
        if path in homes:
            place = homes[path]
        elif opening.whole.get(module) == path and used.isdisjoint(map(id, state_of(module))):
            added[place].append(path)
    unused = [
        f"{path}.{name}" if path else name
        for path, module in opening.opened()
        for name, tensor in {**module._parameters, **module._buffers}.items()
        if tensor is not None and id(tensor) not in used
    ]
    first, *others = [
        group._replace(modules=(*more, *group.modules)) if group.modules else group
        for group, more in zip(groups, added, strict=True)
    ]
    return [first._replace(tensors=(*first.tensors, *unused)), *others]


def _opening_of(model: nn.Module, groups: Mapping[str, Group]) -> Opening:
    """Return what is whole and what is open if layers call these modules and use these tensors beside them."""
    whole = dict.fromkeys(path for group in groups.values() for path in group.modules)
    owners = dict.fromkeys(path.rpartition(".")[0] for group in groups.values() for path in group.tensors)
    inside = tuple(f"{path}." for path in whole)
    return Opening(model, [*whole], [owner for owner in owners if not f"{owner}.".startswith(inside)])


def _flattened(arguments: Arguments) -> tuple[list[Any], Hashable]:
    """Return the leaves of arguments and a key of their nest. Most have no nests, and are flattened without pytree."""
    args, kwargs = arguments
    values = [*args, *kwargs.values()]
    if all(type(value) is Tensor or type(value) in ATOMS for value in values):
        return values, (len(args), *kwargs)
    leaves, spec = pytree.tree_flatten(arguments)
    return leaves, repr(spec)


def _key(leaves: Sequence[Any], nest: Hashable) -> Hashable:
    places = {id(leaf): place for place, leaf in enumerate(leaves)}  # an argument may be given twice
    return (
        nest,
        tuple([_key_of(leaf) for leaf in leaves]),
        tuple([places[id(leaf)] for leaf in leaves if isinstance(leaf, Tensor)]),
    )


def _key_of(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad, leaf.is_contiguous()
    return value_key(leaf)


def _tensor_at(model: nn.Module, path: str) -> Tensor:
    owner, _, name = path.rpartition(".")
    return held(model.get_submodule(owner), name)
