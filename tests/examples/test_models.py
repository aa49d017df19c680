"""Each example has a model, a sample, a target and a loss that fit each other; CI runs the examples themselves."""

from __future__ import annotations

import importlib

import pytest
import torch


@pytest.mark.parametrize("name", ["digits", "language"])
def test_model_returns_what_a_step_needs(name: str) -> None:
    model, x, y, loss_fn = importlib.import_module(f"examples.{name}").model()
    assert len(x) == len(y)
    with torch.no_grad():
        assert loss_fn(model(x[:4]), y[:4]).isfinite()
