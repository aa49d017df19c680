"""Compares a model with the profile of its plan, and reports or warns of changed layers."""

from __future__ import annotations

import warnings

from torch import nn

from ..capture import Chain, LayerInfo, describe
from ..units import format_bytes
from .plans.plan import Plan

_SHOWN = 5


class ModelChanged(UserWarning):
    """The model of a plan differs from the profiled model, so the costs of the plan may be wrong."""


def warn_of_changes(plan: Plan, model: nn.Module | Chain, stacklevel: int = 2) -> None:
    """Warn with :class:`ModelChanged` if a model differs from the profile of its plan.

    Args:
        plan: of the model.
        model: the current model.
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
    """Return one message per difference between the layers of a model and the profile of its plan.

    Does not run the model. The model's device, its mode (train or eval) and its parameter values are ignored. The list
    is empty for a plan without a profile.

    Args:
        plan: of the model.
        model: the current ``nn.Sequential``, or the chain of any model.

    Raises:
        TypeError, ValueError: this kind of model cannot be planned.
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
    places = zip(common, [name for name in before if name in now], strict=True)
    moved = [(name, former) for name, former in places if name != former]
    changes += [f"layer {name!r} stands where layer {former!r} was" for name, former in moved[:1]]
    for name in common:
        facts, former_facts = _facts(now[name]), _facts(before[name])
        different = [what for what in facts if facts[what] != former_facts[what] and former_facts[what]]
        if different:  # report the first only: it explains the rest, as a new dtype also changes bytes
            what = different[0]
            changes.append(f"layer {name!r}: {what} now {facts[what]}, before {former_facts[what]}")
    return changes


def _facts(info: LayerInfo) -> dict[str, str]:
    """Return the properties of a layer that determine its costs, as name -> text; empty text if unknown."""
    return {
        "module": info.description,
        "class": info.kind,
        "dtype": " and ".join(info.dtypes),
        "tensors shared with": ", ".join(map(repr, info.shares_with)) or "none",
        "parameters": _size(info.parameter_bytes),
        "trained parameters": _size(info.gradient_bytes),
    }


def _size(size: int) -> str:
    return f"{size} bytes" if size < 1024 else f"{size} bytes ({format_bytes(size)})"
