"""The keywords that a plan was made with, as the plan keeps them."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Literal

from pydantic import Field, field_validator

from ..document import Value
from .costs.stage_memory import OffloadChoice, RecomputeChoice


class PlanConstraints(Value):
    """The keywords that :func:`pipepart.plan` was called with; :func:`~pipepart.replan` uses them again."""

    schedule: str = "auto"
    micro_batches: int | Literal["auto"] = "auto"
    recompute: RecomputeChoice = "auto"
    offload: OffloadChoice = "auto"
    stages: int | Literal["auto"] = "auto"
    chunks: int | None = None
    replicas: int | Literal["auto"] = 1
    max_micro_batches: int | None = None
    pin: dict[str, int] = Field(default_factory=dict)
    colocate: tuple[tuple[str, ...], ...] = ()
    no_cut_before: tuple[str, ...] = ()
    cut_before: tuple[str, ...] | None = None
    allow_split_ties: bool = False
    reduction: Literal["mean", "sum", "batch"] | None = None
    seconds: float | None = Field(default=None, gt=0)

    @field_validator("colocate", "no_cut_before", mode="before")
    @classmethod
    def _sets_in_order(cls, given: object) -> object:
        """Sort sets, so that equal arguments give equal plans."""
        return _in_order(given)

    @property
    def given(self) -> dict[str, Any]:
        """The keywords that are not the defaults."""
        fields = type(self).model_fields
        return {
            name: value
            for name, value in self
            if value != fields[name].get_default(call_default_factory=True)
        }


def _in_order(given: object) -> object:
    """Return lists and sets, and those inside of them, as tuples; sets sorted."""
    if not isinstance(given, list | tuple | Set):
        return given
    inner = tuple(map(_in_order, given))
    return tuple(sorted(inner, key=str)) if isinstance(given, Set) else inner
