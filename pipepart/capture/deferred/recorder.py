"""Runs the operations of a construction on the meta device and logs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...autograd.dispatch_mode import DispatchMode
from ...autograd.own_copy import tensors
from ..recorded.refusal import CaptureError, line_of_user
from .generators import Generators
from .log import Constant, GeneratorRef, Log, Memory, Operation, View
from .replay import replay
from .traits import Traits, traits_of

_aten = torch.ops.aten
_LIFTS = frozenset({_aten.lift_fresh.default, _aten.lift.default})  # how torch.tensor and from_numpy end
_SETS_STORAGE = frozenset({_aten.set_.source_Storage, _aten.set_.source_Storage_storage_offset})
_META = torch.device("meta")


class Recorder(DispatchMode):
    """Turns every new tensor into one on the meta device, and logs what its values are.

    Args:
        log: gets the operations.

    Attributes:
        keeps_meta: whether the constructor itself asks for tensors on the meta device, which then have no values.
    """

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log
        self.generators = Generators(log)
        self.keeps_meta = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return self._called(func, tuple(args), dict(kwargs or {}))

    def has(self, tensor: Any) -> bool:
        """Return True for a tensor that was made in the block."""
        return isinstance(tensor, Tensor) and self._log.memory_of(tensor) is not None

    def computed(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor on the CPU, with the values that it has at this point of the construction."""
        return self._with_values(tensor)[0]

    def constant(self, data: Tensor, own: bool = False) -> Tensor:
        """Return a deferred tensor with this data, which is copied if it is not the recorder's ``own``."""
        _check_kind("a tensor of data", data)
        data = data.detach()
        made = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device=_META)
        shared = not data.untyped_storage().resizable()  # with an array of numpy
        constant = Constant(
            self._log.new_memory(made), data if own else data.clone(), data if shared and not own else None
        )
        self._log.entries.append(constant)
        return made

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        traits = traits_of(func)
        given = tensors((args, kwargs))
        if func in _LIFTS:
            return args[0] if args[0].is_meta else self.constant(args[0])
        if func in _SETS_STORAGE:  # as torch.load does
            if args[1].device.type != "cpu":
                raise _refused(func, "reads a tensor from memory, as of torch.load(io.BytesIO(...))")
            data = torch.empty(0, dtype=args[0].dtype).set_(*args[1:])  # type: ignore[call-overload]
            return args[0].set_(self.constant(data, own=True))
        for tensor in given:
            _check_kind(func, tensor)
        if self._has_no_values(func, traits, given, kwargs):
            return func(*args, **kwargs)
        if given and not any(tensor.is_meta for tensor in given):
            return self._outside(func, traits, args, kwargs, given)
        written = traits.written(args, kwargs)
        if not traits.makes_tensors or any(not tensor.is_meta for tensor in written):
            return self._run_on_values(func, traits, args, kwargs)
        args, kwargs = pytree.tree_map(self._deferred, (args, kwargs))
        self._place(func, traits, kwargs, bool(given))
        try:
            result = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError):
            if not traits.in_place:  # the shape of its result depends on values, or it is an error
                return self._run_on_values(func, traits, args, kwargs)
            self._try_on_values(func, traits, args, kwargs)
            result = written[0]
        self._add(func, traits, args, kwargs, written, result)
        return result

    def _has_no_values(
        self, func: Any, traits: Traits, given: Sequence[Tensor], kwargs: dict[str, Any]
    ) -> bool:
        """Return True for an operation on the meta device that the plain construction has there, too."""
        if self.keeps_meta and str(kwargs.get("device")) == "meta":
            return True
        foreign = [tensor for tensor in given if tensor.is_meta and not self.has(tensor)]
        if not foreign or (traits.is_empty and kwargs.get("device") is not None):
            return False
        if any(Memory.of(tensor) is not None for tensor in foreign):
            raise _refused(func, "uses a tensor of another block of deferred_init")
        if len(foreign) < len(given):
            raise _refused(func, "uses a tensor on the meta device, which has no values")
        return True

    def _outside(
        self,
        func: Any,
        traits: Traits,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: Sequence[Tensor],
    ) -> Any:
        """Run an operation on tensors from outside of the block. What it makes belongs to the block."""
        if traits.draws:
            raise _refused(func, "draws random numbers for a tensor that was made outside of the block")
        result = func(*args, **kwargs)
        known = {tensor.untyped_storage()._cdata for tensor in given}
        return pytree.tree_map_only(
            Tensor,
            lambda t: t if t.untyped_storage()._cdata in known else self.constant(t, own=True),
            result,
        )

    def _run_on_values(self, func: Any, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on the values of its arguments, which reads values or writes to a tensor from outside."""
        if traits.draws:
            raise _refused(func, "draws random numbers in a way that the meta device does not have")
        written = traits.written(args, kwargs)
        if any(tensor.is_meta for tensor in written):
            raise _refused(func, "writes tensors whose shapes depend on values, or several")
        result = self._on_values(func, args, kwargs)
        originals = {id(tensor) for tensor in written}
        return pytree.tree_map_only(
            Tensor, lambda t: t if id(t) in originals else self.constant(t, own=True), result
        )

    def _try_on_values(
        self, func: Any, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Raise what the operation raises in the plain construction, if it does."""
        if traits.draws:
            raise _refused(func, "draws random numbers in a way that the meta device does not have")
        self._on_values(func, args, kwargs)

    def _on_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on copies of its deferred arguments that have values."""
        given = tensors((args, kwargs))
        meta = [tensor for tensor in given if tensor.is_meta]
        values = {id(tensor): value for tensor, value in zip(meta, self._with_values(*meta), strict=True)}
        real_args, real_kwargs = pytree.tree_map(lambda leaf: values.get(id(leaf), leaf), (args, kwargs))
        if real_kwargs.get("device") == _META:
            real_kwargs["device"] = torch.device("cpu")
        return func(*real_args, **real_kwargs)

    def _with_values(self, *deferred: Tensor) -> list[Tensor]:
        views = [self._log.view_of(tensor) for tensor in deferred]
        storages: dict[int, torch.UntypedStorage] = {}
        replay(self._log, {view.memory for view in views}, storages.__setitem__)
        return [view.on(storages[view.memory]) for view in views]

    def _deferred(self, leaf: Any) -> Any:
        """Return data from outside of the block as a deferred tensor; a number in a tensor stays one."""
        if not isinstance(leaf, Tensor) or leaf.is_meta or not leaf.dim():
            return leaf
        return self.constant(leaf)

    def _place(self, func: Any, traits: Traits, kwargs: dict[str, Any], has_tensors: bool) -> None:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type not in ("cpu", "meta"):
            raise _refused(
                func, f"makes a tensor on {device}: construct for the CPU, the pipeline moves each stage"
            )
        if traits.takes_device and (device is not None or not has_tensors):
            kwargs["device"] = _META
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False

    def _add(
        self,
        func: Any,
        traits: Traits,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: Sequence[Tensor],
        result: Any,
    ) -> None:
        """Log an operation that has run, unless it only makes views or memories without values."""
        writes = {self._log.view_of(tensor).memory for tensor in written}
        made: list[tuple[int, View]] = []
        for place, leaf in enumerate(pytree.tree_leaves(result)):
            if isinstance(leaf, Tensor) and self._log.memory_of(leaf) is None:
                made.append((place, self._log.new_memory(leaf)))
        if traits.is_empty or not (made or (writes and not traits.moves_only)):
            return
        if made and traits.takes_dtype and kwargs.get("dtype") is None and not traits.takes_tensors:
            kwargs["dtype"] = result.dtype  # torch's default may have changed when it is replayed
        generator = None
        if traits.draws:
            leaves = pytree.tree_leaves((args, kwargs))
            used = next((leaf for leaf in leaves if isinstance(leaf, torch.Generator)), None)
            generator = self.generators.before_draw(used)
        replayed = pytree.tree_map(lambda leaf: self._described(leaf, generator), (args, kwargs))
        if "device" in replayed[1]:
            replayed[1]["device"] = torch.device("cpu")
        views = [leaf for leaf in pytree.tree_leaves(replayed, is_leaf=_is_view) if isinstance(leaf, View)]
        fresh = {view.memory for _, view in made}
        whole = set(fresh)
        if traits.overwrites and views[0].covers(self._log.sizes[views[0].memory]):
            whole |= {views[0].memory} - {view.memory for view in views[1:]}
        reads = {view.memory for view in views} - whole
        self._log.entries.append(
            Operation(
                func,
                *replayed,
                reads=frozenset(reads),
                writes=frozenset(writes | fresh),
                kills=frozenset(whole),
                made=tuple(made),
                generator=generator,
                fills=traits.draws and (traits.overwrites or not views),
            )
        )
        if generator is not None:
            self.generators.after_draw(generator, len(self._log.entries) - 1)

    def _described(self, leaf: Any, generator: int | None) -> Any:
        if isinstance(leaf, torch.Generator):
            assert generator is not None
            return GeneratorRef(generator)
        if isinstance(leaf, Tensor) and leaf.is_meta:
            return self._log.view_of(leaf)
        return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _check_kind(what: Any, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        raise _refused(what, f"uses a tensor of layout {tensor.layout}, which has no plain memory")
    if tensor.device.type not in ("cpu", "meta"):
        raise _refused(what, f"uses a tensor on {tensor.device}: construct for the CPU")


def _refused(func: Any, why: str) -> CaptureError:
    return CaptureError(
        f"{func} at {line_of_user()} {why}. deferred_init cannot defer this: construct this part outside of the block, "
        "or the model without it"
    )


def _is_view(leaf: Any) -> bool:
    return isinstance(leaf, View | GeneratorRef)
