"""PipelineFingerprint: digests of a pipeline's plan, model and options, which must be equal on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..capture import Chain
from ..input_error import InputError
from ..planning import Plan
from ..ranks import Ranks
from .mini_batches import digest

_FIRST = 8  # numbers of each tensor of the model that are compared
_PLAIN = bool | int | float | str | tuple | type(None)

Described = dict[str, str]  # by name, what it is


class PipelineFingerprint:
    """Digests of the arguments of one rank, taken before the pipeline moves any layer.

    Args:
        plan, model: arguments of the pipeline.
        options: the others, by name.
    """

    def __init__(self, plan: Plan, model: nn.Module | Chain, options: Mapping[str, Any]) -> None:
        self._plan = digest(plan.model_dump_json(exclude={"alternatives", "profile"}))
        self._options = described_options(options)
        module = model if isinstance(model, nn.Module) else model.model
        self._layers = _layers(module)
        self._values = {name: digest(value) for name, value in _first_values(module).items()}

    def check(self, ranks: Ranks) -> None:
        """Compare with the other ranks; all ranks call this.

        Raises:
            InputError: the ranks have different plans, models or options, on all of them.
        """
        mine = self._plan, self._options, digest(self._layers), digest(self._values)
        plans, options, layers, values = zip(*ranks.gather(mine, patient=True), strict=True)
        if rank := _first_other(plans):
            raise InputError(
                f"rank {rank} has another plan than rank 0: make it on one rank and read it on all (plan.save, "
                "Plan.load), or use Pipeline.auto, which does so"
            )
        check_options(options)
        if rank := _first_other(layers):
            found = ranks.gather(self._layers)
            raise InputError(
                f"rank {rank} has another model than rank 0: {_difference(found[0], found[rank], rank)}. All ranks "
                "make the same model, and each keeps the layers of its stages"
            )
        if rank := _first_other(values):
            found = ranks.gather(self._values)
            both = found[0].keys() & found[rank].keys()  # without tensors on the meta device
            other = next(
                (name for name in found[0] if name in both and found[0][name] != found[rank][name]), ""
            )
            if other and ranks.rank == 0:
                warnings.warn(
                    f"{other!r} has other values on rank {rank} than on rank 0. The pipeline takes those of the rank "
                    "that has the stage: one process would compute other numbers. Call torch.manual_seed with the "
                    "same number on all ranks before the model is made",
                    stacklevel=5,  # of the script
                )


def described_options(options: Mapping[str, Any]) -> Described:
    """Format arguments as text that is equal on all ranks that run the same script."""
    return {name: _described(value) for name, value in options.items()}


def check_options(found: tuple[Described, ...]) -> None:
    """Check that all ranks have the same options.

    Args:
        found: by rank.

    Raises:
        InputError: they have not.
    """
    if rank := _first_other(found):
        name = next(name for name in found[0] if found[rank][name] != found[0][name])
        raise InputError(
            f"{name} is {found[rank][name]} on rank {rank} and {found[0][name]} on rank 0: pass the same arguments "
            "on all ranks"
        )


def _first_other(values: tuple[Any, ...]) -> int:
    """Return the first rank whose value is not that of rank 0; 0 if there is none."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), 0)


def _difference(first: Described, other: Described, rank: int) -> str:
    for name in (*first, *other):
        if first.get(name) != other.get(name):
            return f"{name} is {other.get(name, 'missing')} on rank {rank} and {first.get(name, 'missing')} on rank 0"
    return "its layers are in another order"


def _layers(model: nn.Module) -> Described:
    """Return the modules, parameters and buffers of a model."""
    found = {
        f"layer {name!r}" if name else "it": _described(module) for name, module in model.named_modules()
    }
    for name, tensor in _tensors(model):
        shape = "uninitialized" if nn.parameter.is_lazy(tensor) else str(list(tensor.shape))
        found[repr(name)] = f"{str(tensor.dtype).removeprefix('torch.')} {shape}"
    return found


def _first_values(model: nn.Module) -> dict[str, bytes]:
    """Return a few numbers of each tensor of a model that the CPU has."""
    return {
        name: repr(
            tensor.detach()[(slice(_FIRST),) if tensor.dim() else ()].flatten()[:_FIRST].tolist()
        ).encode()
        for name, tensor in _tensors(model)
        if type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu" and not tensor.is_sparse
    }


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _described(value: Any) -> str:
    """Return what a value is, without its address in memory and without what may depend on the rank."""
    if isinstance(value, _PLAIN | dict | list):
        return repr(value)
    if isinstance(value, partial):
        return _described(value.func)
    if isinstance(value, nn.Module):
        settings = vars(value).items() if type(value).__module__.startswith("torch.nn.modules") else ()
        plain = [
            f"{name}={one!r}"
            for name, one in settings
            if name != "training" and not name.startswith("_") and isinstance(one, _PLAIN)
        ]
        return f"{type(value).__name__}({', '.join(plain)})"
    return getattr(value, "__qualname__", type(value).__qualname__)
