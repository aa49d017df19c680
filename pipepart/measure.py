"""``pipepart.profile``: what the layers of a model cost, and what the runtime adds to each action and message."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from .profiling import Profile
from .profiling import profile as profile_layers
from .runtime.overhead import measured_overhead

_Arguments = ParamSpec("_Arguments")


def _with_runtime(measure: Callable[_Arguments, Profile]) -> Callable[_Arguments, Profile]:
    @wraps(measure)
    def profile(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Profile:
        found = measure(*args, **kwargs)
        if found.roofline is not None or found.device != "cpu":
            return found
        runtime = measured_overhead()
        added = found.overhead.model_copy(
            update={
                "action_seconds": runtime.action_seconds,
                "message_seconds": runtime.message_seconds,
            }
        )
        return found.model_copy(update={"overhead": added})

    return profile


profile = _with_runtime(profile_layers)
