"""Compares a model with the profile of its plan, and reports or warns of changed layers."""

from __future__ import annotations

import warnings

from torch import nn

from ..capture import Chain, LayerInfo, describe
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
    before = {info.name: _facts(info) for info in plan.profile.layers}
    if plan.profile.tensor > 1:  # it has the bytes of one of the processes that share the layers
        for facts in before.values():
            facts |= {"parameters": "", "trained parameters": ""}
    now = {info.name: _facts(info) for info in describe(model)}
    changes = [
        f"layer {name!r} ({facts['module']}) is gone" for name, facts in before.items() if name not in now
    ]
    changes += [
        f"layer {name!r} ({facts['module']}) is new" for name, facts in now.items() if name not in before
    ]
    for name, facts in now.items():
        for what, former in before.get(name, {}).items():
            if former and facts[what] != former:
                changes.append(f"layer {name!r}: {what} now {facts[what]}, before {former}")
                break  # the first difference explains the rest, as a new dtype also changes bytes
    if before.keys() == now.keys() and list(before) != list(now):
        name, former = next(pair for pair in zip(now, before, strict=True) if pair[0] != pair[1])
        changes.append(f"layer {name!r} stands where layer {former!r} was")
    return changes


def _facts(info: LayerInfo) -> dict[str, str]:
    """Return the properties of a layer that determine its costs, as name -> text; empty text if unknown."""
    return {
        "module": info.description,
        "class": info.kind,
        "dtype": " and ".join(info.dtypes),
        "tensors shared with": ", ".join(map(repr, info.shares_with)) or "none",
        "parameters": f"{info.parameter_bytes} bytes",
        "trained parameters": f"{info.gradient_bytes} bytes",
    }
