"""Compares trainings on ranks with one in one process, in one stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from pipepart import Plan
from tests.inside_stage.cases import Layout, blocks, trained
from tests.support import plain
from tests.support.ranks import assert_same_bits

_STEPPED = 1e-10  # of values after optimizer steps: AdamW divides small gradients by their size


def assert_near_plain(
    found: Sequence[dict[str, Any]], make: Callable[[], nn.Module] = blocks, plan: Plan | None = None
) -> None:
    """Near the numbers of one process in float64, and equal on all ranks; ``plan`` of a recorded model."""
    wanted = trained(make, Layout(borders=(), micro_batches=1), plan=plan)
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
