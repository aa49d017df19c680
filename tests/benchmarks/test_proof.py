"""A contender with wrong gradients is not timed."""

import pytest
import torch

from benchmarks.proof import WrongGradientsError, require_equal

REFERENCE = {"weight": torch.tensor([3.0, 4.0]), "bias": torch.tensor([0.0])}


def test_rounding_passes_and_its_size_is_returned():
    nearly = {"weight": REFERENCE["weight"] * (1 + 1e-6), "bias": REFERENCE["bias"]}
    assert require_equal("x", nearly, REFERENCE) == pytest.approx(1e-6, rel=0.2)


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        ({"weight": torch.tensor([1.5, 2.0]), "bias": REFERENCE["bias"]}, "weight is off by"),
        ({"weight": torch.full((2,), float("nan")), "bias": REFERENCE["bias"]}, "weight"),
        ({"weight": REFERENCE["weight"]}, "bias"),
    ],
)
def test_a_wrong_scale_nan_or_a_missing_parameter_is_refused(gradients, message):
    with pytest.raises(WrongGradientsError, match=message):
        require_equal("x", gradients, REFERENCE)
