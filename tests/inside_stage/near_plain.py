"""Compares trainings on ranks with one of the plain model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tests.inside_stage.cases import blocks, plainly_trained
from tests.support import plain
from tests.support.ranks import assert_same_bits

_STEPPED = 1e-10  # of values after optimizer steps: AdamW divides small gradients by their size


def assert_near_plain(found: Sequence[dict[str, Any]], make: Callable[[], nn.Module] = blocks) -> None:
    """Near the numbers of the plain model in float64, and equal on all ranks."""
    wanted = plainly_trained(make)
    for one in found:
        for key in ("losses", "norms", "evaluated", "output", "input", "state"):
            assert_same_bits(one[key], found[0][key], key)
        own, everything = one["gradients"][0], wanted["gradients"][0]
        plain.assert_close(own, {name: everything[name] for name in own})
        plain.assert_near(one["losses"][0], wanted["losses"][0])
        plain.assert_near(one["norms"][0], wanted["norms"][0])
        for key in ("losses", "norms", "evaluated"):
            plain.assert_near(torch.stack(one[key]), torch.stack(wanted[key]), _STEPPED, key)
        for key in ("output", "input"):
            plain.assert_near(one[key], wanted[key], _STEPPED, key)
        plain.assert_close(one["state"], dict(wanted["state"]), _STEPPED)
