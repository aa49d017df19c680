"""``pipepart.profile``: measures layer costs, and the runtime overhead of each action and message."""

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
        layer_profile = measure(*args, **kwargs)
        if layer_profile.roofline is not None or layer_profile.device != "cpu":
            return layer_profile
        runtime = measured_overhead()
        overhead = layer_profile.overhead.model_copy(
            update={
                "action_seconds": runtime.action_seconds,
                "message_seconds": runtime.message_seconds,
                "step_seconds": runtime.step_seconds,
            }
        )
        return layer_profile.model_copy(update={"overhead": overhead})

    return profile


profile = _with_runtime(profile_layers)
