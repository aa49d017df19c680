"""State of a process besides tensors: random generators, schedulers, loss scaler and data position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..input_error import InputError
from .json_values import decode, encode
from .random_state import random_state, set_random_state


def own_state(schedulers: Sequence[Any], scaler: Any, data: Any) -> dict[str, Any]:
    """Return the state as plain JSON.

    Args:
        schedulers: of the learning rate.
        scaler: a GradScaler, or None.
        data: what the user wants to have back.

    Raises:
        TypeError: JSON cannot hold a value; the message names it.
    """
    return {
        "random": encode(random_state(), "random"),
        "schedulers": [
            {"kind": type(one).__name__, "state": encode(one.state_dict(), "scheduler")} for one in schedulers
        ],
        "scaler": None if scaler is None else encode(scaler.state_dict(), "scaler"),
        "data": encode(data, "data"),
    }


class SavedOwn:
    """The saved states of processes in a checkpoint.

    Args:
        states: that of this process alone, if there are as many as there were; otherwise of all that saved.
    """

    def __init__(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._states = states

    def check(self, schedulers: Sequence[Any], scaler: Any) -> None:
        """Check that the saved states fit the schedulers and the scaler. Nothing is changed.

        Raises:
            ValueError: there is none, it is of another kind, or ranks that there are no longer had different ones.
        """
        if schedulers:
            for one, saved in zip(schedulers, self._schedulers(len(schedulers)), strict=True):
                _check_scheduler(one, saved)
        if scaler is not None and not (self._common("scaler") or not scaler.is_enabled()):
            raise InputError(
                "the checkpoint has no state of a scaler: it was saved without, or with a disabled one"
            )

    def load(self, schedulers: Sequence[Any], scaler: Any, random: bool) -> None:
        """Load the schedulers, the scaler and, if ``random``, the random generators. Call :meth:`check` first."""
        if schedulers:
            for one, saved in zip(schedulers, self._schedulers(len(schedulers)), strict=True):
                one.load_state_dict(decode(saved["state"]))
        if scaler is not None and scaler.is_enabled():
            scaler.load_state_dict(decode(self._common("scaler")))
        if random:
            set_random_state(decode(self._states[0]["random"]))

    @property
    def data(self) -> list[Any]:
        """The data position, or the positions of all processes if they differ."""
        found = [state["data"] for state in self._states] if self._differ("data") else [self._common("data")]
        return decode(found)

    def _schedulers(self, count: int) -> Sequence[Mapping[str, Any]]:
        saved = self._common("schedulers")
        if not saved:
            raise InputError("the checkpoint has no state of a scheduler")
        if len(saved) != count and any(one != saved[0] for one in saved):
            raise InputError(
                f"the checkpoint has {len(saved)} schedulers with different states, and {count} are to be loaded"
            )
        return saved if len(saved) == count else [saved[0]] * count

    def _common(self, key: str) -> Any:
        if self._differ(key):
            raise InputError(
                f"the {key} of the {len(self._states)} ranks that saved differ: load with as many ranks, or without"
            )
        return next((state[key] for state in self._states if state[key]), None)

    def _differ(self, key: str) -> bool:
        """Return whether the ranks had different values; those of stages without parameters may have none."""
        given = [state[key] for state in self._states if state[key]]
        return any(one != given[0] for one in given)


def _check_scheduler(scheduler: Any, saved: Mapping[str, Any]) -> None:
    kind, now, then = type(scheduler).__name__, scheduler.state_dict(), saved["state"]
    if saved["kind"] != kind or now.keys() != then.keys():
        raise InputError(f"the checkpoint has the state of a {saved['kind']}, and the scheduler is a {kind}")
    groups = [len(state.get("base_lrs", ())) for state in (then, now)]
    if groups[0] != groups[1]:
        raise InputError(f"the saved {kind} had {groups[0]} groups of parameters, and there are {groups[1]}")
