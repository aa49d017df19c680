"""Checks that a contender computes the gradients of the plain model, before it is timed."""

from collections.abc import Mapping

from torch import Tensor

# Single precision, and sums taken in another order: a wrong scale or a lost micro-batch is off by far more.
TOLERANCE = 1e-4


class WrongGradientsError(AssertionError):
    """A contender whose time would mean nothing."""


def require_equal(
    name: str,
    gradients: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    tolerance: float = TOLERANCE,
) -> float:
    """The largest relative error of any parameter's gradient; raises when one is missing or too far off."""
    if gradients.keys() != reference.keys():
        raise WrongGradientsError(
            f"{name} has gradients for other parameters: {sorted(gradients.keys() ^ reference.keys())}"
        )
    errors = {
        parameter: float((gradients[parameter] - expected).norm() / expected.norm().clamp_min(1e-12))
        for parameter, expected in reference.items()
    }
    worst = max(errors, key=errors.__getitem__)
    if not errors[worst] <= tolerance:
        raise WrongGradientsError(f"{name}: the gradient of {worst} is off by {errors[worst]:.1e} (relative)")
    return errors[worst]
