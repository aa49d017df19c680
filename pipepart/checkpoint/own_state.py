"""State of a process besides tensors: random generators, schedulers, loss scaler and data position."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from ..generators import set_state, state_of
from ..input_error import InputError
from .arguments import several
from .json_values import decode, encode


def own_state(scheduler: Any, scaler: Any, data: Any) -> dict[str, Any]:
    """Return the state as plain JSON; the arguments are those of ``save``.

    Raises:
        TypeError: an argument is of another type, or JSON cannot hold a value; the message names it.
    """
    _checked_scaler(scaler)
    return {
        "random": encode(_random_state(), "random"),
        "schedulers": [
            {"kind": type(each).__name__, "state": encode(each.state_dict(), "scheduler")}
            for each in several("scheduler", scheduler, LRScheduler)
        ],
        "scaler": None if scaler is None else encode(scaler.state_dict(), "scaler"),
        "data": encode(data, "data"),
    }


class SavedOwn:
    """The saved states of processes in a checkpoint, for the schedulers and the scaler of this one.

    Args:
        states: by rank; that of this process first, if there are as many as there were.
        scheduler, scaler: as for ``load``.
    """

    def __init__(self, states: Sequence[Mapping[str, Any]], scheduler: Any, scaler: Any) -> None:
        self._states = states
        self._schedulers = several("scheduler", scheduler, LRScheduler)
        self._scalers = [each for each in _checked_scaler(scaler) if each.is_enabled()]
        self.data = decode(self._first("data"))

    def check(self) -> None:
        """Check that the saved states fit. Nothing is changed.

        Raises:
            ValueError: there is none, or it is of another kind.
        """
        for scheduler, saved in self._with_states():
            _check_scheduler(scheduler, saved)
        if self._scalers and not self._first("scaler"):
            raise InputError(
                "the checkpoint has no state of a scaler: it was saved without, or with a disabled one"
            )

    def load(self, random: bool) -> None:
        """Load the schedulers, the scaler and, if ``random``, the random generators. Call :meth:`check` first."""
        for scheduler, saved in self._with_states():
            scheduler.load_state_dict(decode(saved["state"]))
        for scaler in self._scalers:
            scaler.load_state_dict(decode(self._first("scaler")))
        if random:
            _set_random_state(decode(self._states[0]["random"]))

    def _with_states(self) -> list[tuple[LRScheduler, Mapping[str, Any]]]:
        """Pair the schedulers with saved states. Equal states of stages fit any number of schedulers."""
        saved, count = self._first("schedulers"), len(self._schedulers)
        if not count:
            return []
        if not saved:
            raise InputError("the checkpoint has no state of a scheduler")
        if len(saved) != count:
            if any(state != saved[0] for state in saved):
                raise InputError(
                    f"the checkpoint has {len(saved)} schedulers with different states, and {count} are to be loaded"
                )
            saved = [saved[0]] * count
        return list(zip(self._schedulers, saved, strict=True))

    def _first(self, key: str) -> Any:
        """Return what the first rank has that has any: those of stages without parameters may have none."""
        return next((state[key] for state in self._states if state[key]), None)


def _checked_scaler(scaler: Any) -> list[GradScaler]:
    """Return a list of the scaler, empty for None. There is one at most: a sequence is refused."""
    return several("scaler", None if scaler is None else [scaler], GradScaler)


def _check_scheduler(scheduler: Any, saved: Mapping[str, Any]) -> None:
    kind, now, then = type(scheduler).__name__, scheduler.state_dict(), saved["state"]
    if saved["kind"] != kind or now.keys() != then.keys():
        raise InputError(f"the checkpoint has the state of a {saved['kind']}, and the scheduler is a {kind}")
    groups = [len(state.get("base_lrs", ())) for state in (then, now)]
    if groups[0] != groups[1]:
        raise InputError(f"the saved {kind} had {groups[0]} groups of parameters, and there are {groups[1]}")


def _random_state() -> dict[str, Any]:
    """Return the states of the global generators of this process; those of CUDA devices if CUDA is in use."""
    numpy_state: Any = np.random.get_state()
    name, keys, *rest = numpy_state
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": state_of(),
        "cuda": [state_of(device) for device in _cuda_devices()] if torch.cuda.is_initialized() else [],
    }


def _set_random_state(state: Mapping[str, Any]) -> None:
    """Set the generators to a result of :func:`_random_state`; of CUDA devices, as many as there are."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    set_state(state["torch"])
    for device, numbers in zip(_cuda_devices(), state["cuda"], strict=False):
        set_state(numbers, device)


def _cuda_devices() -> list[torch.device]:
    return [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
