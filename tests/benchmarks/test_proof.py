"""The gate before the clock: wrong gradients are not timed."""

import pytest
import torch

from benchmarks.proof import WrongGradientsError, require_equal

REFERENCE = {"weight": torch.tensor([3.0, 4.0]), "bias": torch.tensor([0.0])}


def test_rounding_passes_and_its_size_is_returned():
    nearly = {"weight": REFERENCE["weight"] * (1 + 1e-6), "bias": REFERENCE["bias"]}
    assert require_equal("x", nearly, REFERENCE) == pytest.approx(1e-6, rel=0.2)


def test_a_wrong_scale_is_refused_and_the_parameter_named():
    with pytest.raises(WrongGradientsError, match="weight is off by"):
        require_equal("x", {"weight": REFERENCE["weight"] * 0.5, "bias": REFERENCE["bias"]}, REFERENCE)


def test_nan_is_refused():
    with pytest.raises(WrongGradientsError, match="weight"):
        require_equal("x", {"weight": torch.full((2,), float("nan")), "bias": REFERENCE["bias"]}, REFERENCE)


def test_a_missing_parameter_is_refused():
    with pytest.raises(WrongGradientsError, match="bias"):
        require_equal("x", {"weight": REFERENCE["weight"]}, REFERENCE)
