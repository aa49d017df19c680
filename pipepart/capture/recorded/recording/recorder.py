"""Records one forward of a model: the torch functions and modules that it calls, with their arguments.

::

    with Recorder:   model(*args, **kwargs)
                       ├─ ids.shape                 nothing: sizes are part of a recording's key
                       ├─ torch.arange(16)          %3 = arange(16)
                       ├─ self.embed(ids)           %4 = embed(%0)           a whole module; nothing in it is recorded
                       ├─ mask.all()  if ...        %5 = all(%1); read: True, asked again at each replay
                       └─ h + self.position(...)    ...

The forward is real, so control flow, hooks and whatever Python does take their course. Whole modules run without
gradients, and their outputs are cut off their graph, so that nothing of them is kept.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ....autograd import graph_cut
from ....autograd.in_place import version
from ....autograd.nests import check_nest, register_dataclasses
from ....autograd.own_copy import tensors
from ..fake_parameters import asks_for_values
from ..placing import at, home, together
from ..python_state.values import attribute_key, value_key
from ..refusal import (
    CaptureError,
    LeftAsideError,
    SkeletonError,
    line_of_user,
    unknown_value,
    values_refused,
)
from ..replay.calls import HOOKS, Call, autocast_now
from ..replay.given import Given, Ref
from .changes import Changes
from .conditions import Conditions
from .reads import Reads
from .sizes import Sizes, depend_on_values, sizes_of
from .tables import DRAWS, METADATA, REFUSED, SIZES, is_fixed
from .tensor_numbers import TensorNumbers


class Recorder(TorchFunctionMode):
    """Context manager that records the calls of one thread.

    Args:
        state: path of each parameter and buffer.
        held: where the other attributes of the model's modules are kept, by the ids of these and of tensors in them.
        whole: paths of the modules that stay whole.
        opened: the other modules by their paths.
        tracking: whether to note which whole module makes which tensors, for the message of an error.
        conditions: checked at each call.
        changes: is told of each call of a whole module.

    Attributes:
        calls: in order.
        tensors: their numbers.
        aliases: for each write into memory that several values share: the number of its call and these values.
        inner_calls: paths of a whole module and of another one that its code calls.
        attributes: a key of each attribute of a module that the code has read by a name that is not in it.
    """

    def __init__(
        self,
        state: Mapping[int, str],
        held: Mapping[int, str],
        whole: Mapping[nn.Module, str],
        opened: Mapping[str, nn.Module],
        tracking: bool,
        conditions: Conditions,
        changes: Changes,
    ) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.aliases: list[tuple[int, frozenset[int]]] = []
        self.inner_calls: set[tuple[str, str]] = set()
        self.attributes: dict[tuple[nn.Module, str], Hashable] = {}
        self.inside = ""
        self._thread = threading.get_ident()
        self._held, self._whole = held, whole
        self._tracking, self._changes, self._conditions = tracking, changes, conditions
        self.tensors = TensorNumbers(state, held)
        self._reads = Reads(opened, self.calls, self.tensors)
        self._sizes = Sizes(self._reads.are_of_arguments)

    @property
    def here(self) -> bool:
        """True in the recording thread, outside of whole modules."""
        return not self.inside and threading.get_ident() == self._thread

    def is_of_this_forward(self, value: Any) -> bool:
        """Return True for a tensor that depends on the arguments or state, and for a number read from such a tensor."""
        if isinstance(value, Tensor):
            return self.tensors.known(value) in self.tensors.varying
        return self._reads.is_read(value)

    def output(self, value: Any) -> tuple[list[Any], Any]:
        """Return the leaves of the model's output, with refs in place of tensors, and their tree spec."""
        check_nest(value, "the output of the model", "return its tensors themselves, or pass use_cache=False")
        leaves, spec = pytree.tree_flatten(value)
        self._conditions.check_draws("after the last module")
        values = [Ref(self.tensors.number(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return self._reads.output(values, self.tensors.written_state()), spec

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.here:
            return self._not_recorded(func, args, kwargs)
        name = getattr(func, "__name__", "")
        name = func.__self__.__name__ if name == "__get__" else name
        if name in METADATA:
            self._conditions.check_metadata(name, self._changes.names, sys._getframe(1))
            return func(*args, **kwargs)
        if name in SIZES:
            if (number := self.tensors.known(args[0])) is not None:
                self._sizes.read(number)
            return func(*args, **kwargs)
        passed = tensors((args, kwargs))
        before = [version(tensor) for tensor in passed]
        arguments = Given(args, kwargs, self.tensors.number)
        varies = any(number in self.tensors.varying for number in arguments.numbers())
        if name in REFUSED and varies:
            raise SkeletonError(
                f"{name.strip('_')}() is called at {line_of_user()}, between modules that are recorded: a replay would "
                "not repeat it. Move that code into a module of its own"
            )
        self._conditions.check_function(func, name, args, kwargs)
        args, named = together((args, kwargs))
        try:
            result = func(*args, **named)
        except RuntimeError as error:
            if asks_for_values(error):
                raise unknown_value(name, line_of_user()) from error
            raise
        written = [t for t, was in zip(passed, before, strict=True) if version(t) != was]
        if name == "__set__":
            written.append(args[0])
        draws = any(word in name for word in DRAWS)
        if not (tensors(result) or written or varies or name in HOOKS):
            return result
        call = self._emit(func, arguments, result, varies=varies or draws, written=written, draws=draws)
        if varies and depend_on_values(name, args, named):
            self._ask_sizes(call, tensors(result))
        if call.reads:
            self._reads.note(call)
        return result

    def module(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a whole module and record the call."""
        path = self._whole[module]
        self._conditions.check_draws(f"before {path}")
        if torch._C._are_functorch_transforms_active():
            raise SkeletonError(
                f"module {path!r} is called within a transform of torch.func at {line_of_user()}, which a replay would "
                "call without it. Move the transform into a module of its own"
            )
        register_dataclasses((args, kwargs))
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for leaf in leaves:
            self._check_passed(leaf, path)
        passed = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        others = [value_key(leaf) for leaf in leaves if not isinstance(leaf, Tensor)]
        arguments = Given(args, kwargs, self.tensors.number)
        before = [version(tensor) for tensor in passed]
        args, kwargs = at(home(module), (args, kwargs))
        trains = torch.is_grad_enabled() and any(t.requires_grad for t in (*module.parameters(), *passed))
        self.inside = path
        try:
            with self._stepped_aside(), torch.no_grad(), values_refused(path):
                self._changes.check_before(module, path)
                result = call(module, *args, **kwargs)
                self._changes.accept_after(module, path)
            left, spec_after = pytree.tree_flatten((args, kwargs))
            if spec_after != spec or others != [
                value_key(value) for value in left if not isinstance(value, Tensor)
            ]:
                raise SkeletonError(
                    f"module {path!r} changes a list, a dict or an object that it is given at {line_of_user()}"
                )
            what = f"the output of module {path!r}"
            check_nest(result, what, "return its tensors themselves, or pass use_cache=False")
            uncut = pytree.tree_leaves(result)
            result = pytree.tree_map_only(Tensor, lambda t: self._cut_off(t, trains), result)
            written = [t for t, was in zip(passed, before, strict=True) if version(t) != was]
            emitted = self._emit(module, arguments, result, varies=True, written=written, path=path)
            for leaf, out in zip(uncut, emitted.outs, strict=True):
                if type(out) is Ref:  # a hook may have kept it
                    self.tensors.alias(leaf, out.number)
        finally:
            self.inside = ""
        self._conditions.note_draws()
        return result

    def refuse_part(self, part: nn.Module, path: str) -> None:
        """Refuse a call of a part of a whole module by other code than that module's.

        Raises:
            LeftAsideError: always. What the part's code reads in Python is known once the whole module is open.
        """
        error = LeftAsideError(
            f"a {type(part).__name__}, a part of module {path!r}, is called at {line_of_user()}"
        )
        error.culprit = path
        raise error

    def note_attribute(self, module: nn.Module, name: str) -> None:
        """Note that the code reads an attribute of a module by ``getattr`` or ``hasattr``."""
        if name not in self._changes.names and (key := attribute_key(module, name)) is not None:
            self.attributes.setdefault((module, name), key)

    def note_inner_call(self, module: nn.Module) -> None:
        """Note that a whole module is called by the code of another one, unless it is a part of that."""
        caller = next((block for block, path in self._whole.items() if path == self.inside), None)
        if caller is not None and module not in set(caller.modules()):
            self.inner_calls.add((self.inside, self._whole[module]))

    def _check_passed(self, leaf: Any, path: str) -> None:
        """Check that an argument of a whole module is a tensor or something that no forward changes."""
        is_cache = "cache" in type(leaf).__name__.lower()
        if (is_fixed(leaf, objects=True) and not is_cache) or id(leaf) in self._held:
            return
        what = (
            f"module {path!r} is given a {type(leaf).__name__} at {line_of_user()}, which stages cannot share"
        )
        if is_cache:
            # Not a SkeletonError: that would leave the whole model as one layer, where a word is enough.
            raise CaptureError(
                f"{what}: pass use_cache=False, or set model.config.use_cache = False. Where the model makes a cache "
                "all the same, keep the module whole that passes it on: layers=[...]"
            )
        raise SkeletonError(f"{what}: pass tensors and numbers")

    def function(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        """Call a custom autograd function and record the call."""
        self._conditions.check_custom(name, pytree.tree_leaves((args, kwargs)), self._whole)
        arguments = Given(args, kwargs, self.tensors.number)
        self.inside = name
        try:
            result = func(*args, **kwargs)
            self._emit(func, arguments, result, varies=True, written=[], custom=True)
        finally:
            self.inside = ""
        return result

    def _emit(
        self,
        func: Callable[..., Any],
        given: Given,
        result: Any,
        *,
        varies: bool,
        written: list[Tensor],
        draws: bool = False,
        path: str = "",
        custom: bool = False,
    ) -> Call:
        self._conditions.check_modes(path or getattr(func, "__name__", ""))
        wrote = frozenset(self.tensors.number(tensor) for tensor in written)
        if wrote and len(shared := self.tensors.sharing_memory(written)) > 1:
            self.aliases.append((len(self.calls), shared))
        first = self.tensors.count
        leaves, spec = pytree.tree_flatten(result)
        outs = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                number = self.tensors.known(leaf)
                if number is not None:
                    self.tensors.note(leaf, number)
                outs.append(Ref(self.tensors.new(leaf) if number is None else number))
            else:
                outs.append(leaf)
        if varies:
            self.tensors.varying |= {out.number for out in outs if type(out) is Ref} | wrote
        call = Call(
            func,
            given,
            tuple(outs),
            None if isinstance(result, Tensor) else spec,
            frozenset(range(first, self.tensors.count)),
            wrote,
            torch.is_grad_enabled(),
            autocast_now(),
            path,
            line_of_user(),
            draws,
        )
        self.calls.append(call)
        self._sizes.note(call, leaves, own=bool(path) or custom)
        return call

    def _ask_sizes(self, call: Call, results: Sequence[Tensor]) -> None:
        """Record the call that asks for the sizes of what a call returned, in case the model reads them."""
        arguments = Given((*results,), {}, self.tensors.number)
        self._sizes.guard(call, self._emit(sizes_of, arguments, sizes_of(*results), varies=True, written=[]))

    def _cut_off(self, tensor: Tensor, trains: bool) -> Tensor:
        """Return the output of a whole module without a graph; a tensor that it was given stays the same object."""
        if self.tensors.is_given(tensor):
            return tensor
        tensor = tensor.detach()
        if trains and (tensor.is_floating_point() or tensor.is_complex()):
            # An alias may be written in place, as the real output.
            return graph_cut.catching(tensor.requires_grad_(), [None])
        return tensor

    def _not_recorded(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if self._tracking and self.inside and threading.get_ident() == self._thread:
            for tensor in tensors(result):
                self.tensors.made_in[tensor] = self.inside
        return result

    @contextmanager
    def _stepped_aside(self) -> Iterator[None]:
        """Leave the stack of torch's modes, where this mode is the innermost, so that modules run undisturbed."""
        depth = torch._C._len_torch_function_stack()
        innermost = depth and torch._C._get_function_stack_at(depth - 1) is self
        if self._tracking or not innermost:
            yield
            return
        torch._C._pop_torch_function_stack()
        try:
            yield
        finally:
            torch._C._push_on_torch_function_stack(self)
