"""Finds how a model differs from the model that its plan was made for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from torch import nn

from ..capture import Chain, LayerInfo, describe
from ..units import format_bytes
from .plans.plan import Plan

_SHOWN = 5


class ModelChanged(UserWarning):
    """The costs of a plan may be wrong: its model is not the one that was profiled."""


def warn_of_changes(plan: Plan, model: nn.Module | Chain, stacklevel: int = 2) -> None:
    """Warn with :class:`ModelChanged` if the model differs from the one that was profiled for the plan.

    Args:
        plan: of the model.
        model: as it is now.
        stacklevel: as for ``warnings.warn``, 1 for the caller of this function.
    """
    changes = model_changes(plan, model)
    if not changes:
        return
    more = [f"and {len(changes) - _SHOWN} more"] if len(changes) > _SHOWN else []
    listed = "; ".join([*changes[:_SHOWN], *more])
    warnings.warn(
        f"the costs of the plan may be wrong: {listed}. Profile the model and plan again",
        ModelChanged,
        stacklevel=stacklevel + 1,
    )


def model_changes(plan: Plan, model: nn.Module | Chain) -> list[str]:
    """Describe how the layers of a model differ from those that were profiled for a plan, one text per change.

    Nothing is run. The model's device, its mode (train or eval) and the values of its parameters are ignored. A plan
    without a profile reports no change.

    Args:
        plan: of the model.
        model: the ``nn.Sequential`` as it is now, or the chain of any model.

    Raises:
        TypeError, ValueError: no plan can be made for such a model.
    """
    if plan.profile is None:
        return []
    before = {info.name: info for info in plan.profile.layers}
    now = {info.name: info for info in describe(model)}
    changes = [
        f"layer {name!r} ({was.description}) is gone" for name, was in before.items() if name not in now
    ]
    changes += [
        f"layer {name!r} ({info.description}) is new" for name, info in now.items() if name not in before
    ]
    common = [name for name in now if name in before]
    former = [name for name in before if name in now]
    moved = [(name, other) for name, other in zip(common, former, strict=True) if name != other]
    changes += [f"layer {name!r} stands where layer {other!r} was" for name, other in moved[:1]]
    for name in common:
        changes += [f"layer {name!r} {change}" for change in _changes(before[name], now[name])]
    return changes


def _changes(was: LayerInfo, now: LayerInfo) -> Iterator[str]:
    """Return the changes of one layer. A change that explains others replaces them: a new dtype also changes bytes."""
    bytes_explained = False
    if now.kind != was.kind and now.description == was.description:
        yield f"is of class {now.kind}, and was of class {was.kind}"
    if now.description != was.description:
        bytes_explained = True
        yield f"is {now.description}, and was {was.description}"
    if now.dtypes != was.dtypes and now.dtypes and was.dtypes:
        bytes_explained = True
        yield f"is of {' and '.join(now.dtypes)}, and was of {' and '.join(was.dtypes)}"
    if now.shares_with != was.shares_with:
        bytes_explained = True
        yield f"shares parameters or buffers with {_names(now)}, and did with {_names(was)}"
    if now.parameter_bytes != was.parameter_bytes and not bytes_explained:
        yield f"has {_size(now.parameter_bytes)} of parameters, and had {_size(was.parameter_bytes)}"
    if now.gradient_bytes * was.parameter_bytes != was.gradient_bytes * now.parameter_bytes:
        yield (
            f"trains {_size(now.gradient_bytes)} of its {_size(now.parameter_bytes)} of parameters, and trained "
            f"{_size(was.gradient_bytes)} of {_size(was.parameter_bytes)}"
        )


def _names(info: LayerInfo) -> str:
    return ", ".join(map(repr, info.shares_with)) or "none"


def _size(size: int) -> str:
    return f"{size} bytes" if size < 1024 else f"{size} bytes ({format_bytes(size)})"
