"""The catalog of generators: maps the name of a schedule to the function that builds it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ..core.action import ScheduleError
from ..core.schedule import Schedule
from .breadth_first import gpipe, looped_bfs
from .chimera import chimera
from .dualpipe_v import dualpipe_v
from .hanayo import hanayo
from .interleaved import interleaved_1f1b, interleaved_zb
from .one_f_one_b import eager_1f1b, one_f_one_b
from .pipedream import pipedream, pipedream_2bw
from .sequential import sequential
from .v_shape import v_half, v_min
from .zb_v import zb_v
from .zero_bubble import zb_h1, zb_h2

GENERATORS: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {
        "sequential": sequential,
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "eager-1f1b": eager_1f1b,
        "interleaved-1f1b": interleaved_1f1b,
        "looped-bfs": looped_bfs,
        "zb-h1": zb_h1,
        "zb-h2": zb_h2,
        "zb-v": zb_v,
        "v-half": v_half,
        "v-min": v_min,
        "interleaved-zb": interleaved_zb,
        "dualpipe-v": dualpipe_v,
        "chimera": chimera,
        "hanayo": hanayo,
        "pipedream": pipedream,
        "pipedream-2bw": pipedream_2bw,
    }
)


def generate(
    name: str, devices: int, micro_batches: int, chunks: int | None, options: Mapping[str, Any]
) -> Schedule:
    """Build a schedule with the generator of this name; see `build`."""
    if devices < 1 or micro_batches < 1:
        raise ScheduleError(
            f"{name} needs at least 1 device and 1 micro-batch, got {devices} and {micro_batches}"
        )
    generator = GENERATORS[name]
    known = check_options(name, generator, options)
    with_chunks = {"chunks": chunks} if chunks is not None and "chunks" in known else {}
    schedule = generator(devices, micro_batches, **options, **with_chunks)
    if chunks not in (None, schedule.model_stages // devices):
        raise ScheduleError(f"{name} needs chunks={schedule.model_stages // devices}, got chunks={chunks}")
    return schedule


def check_options(name: str, function: Callable[..., Schedule], options: Mapping[str, Any]) -> set[str]:
    """Return the options that the function of a schedule has; raise ScheduleError if it lacks one of these."""
    known = inspect.signature(function).parameters.keys() - {"devices", "micro_batches"}
    if unknown := sorted(options.keys() - known):
        raise ScheduleError(
            f"{name} has no option {unknown[0]!r}; it has {', '.join(sorted(known)) or 'none'}"
        )
    return known
