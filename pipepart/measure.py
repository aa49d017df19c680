"""``pipepart.profile``: measures layer costs, and adds the overhead of the runtime for each action and message."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from .profiling import Profile
from .profiling import profile as profile_layers

_Arguments = ParamSpec("_Arguments")

# The least of 11 measurements on two cores of an EPYC. They differed threefold for actions and thirtyfold for messages
# with what else the machine did: another machine differs less from these than one measurement from the next.
RUNTIME = {"action_seconds": 60e-6, "message_seconds": 60e-6, "step_seconds": 650e-6}


def _with_runtime(measure: Callable[_Arguments, Profile]) -> Callable[_Arguments, Profile]:
    @wraps(measure)
    def profile(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Profile:
        layer_profile = measure(*args, **kwargs)
        if layer_profile.roofline is not None or layer_profile.device != "cpu":
            return layer_profile
        return layer_profile.model_copy(
            update={"overhead": layer_profile.overhead.model_copy(update=RUNTIME)}
        )

    return profile


profile = _with_runtime(profile_layers)
