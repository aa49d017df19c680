"""A directive that draws a schedule: ``{schedule-picture} zb-v``, as ``pipepart simulate -o`` does."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

import schedules

_DEVICES, _MICRO_BATCHES = 4, 8
_WIDTH = 860


class SchedulePicture(Directive):
    """A figure of a schedule on four devices, whose caption has the command and the figures of the step."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Simulate the schedule with stages that take a device one second for each part of a micro-batch."""
        name = self.arguments[0]
        schedule = schedules.build(name, _DEVICES, _MICRO_BATCHES)
        each = [_DEVICES / schedule.model_stages] * schedule.model_stages
        timeline = schedules.simulate(schedule, schedules.StageCosts(each, each, each, stash_bytes=each))
        # The picture takes its colours from the page, so that it is readable on light and on dark.
        svg = timeline.svg(width=_WIDTH, transparent=True)
        picture = nodes.raw("", f'<div class="schedule-picture" tabindex="0">{svg}</div>', format="html")
        command = f"pipepart simulate --schedule {name} --devices {_DEVICES} --micro-batches {_MICRO_BATCHES}"
        caption = nodes.paragraph()
        caption += nodes.Text(
            f"Step {timeline.makespan:g} s, bubble {timeline.bubble:.1%}, "
            f"micro-batches in flight on a device: at most {max(timeline.peak_bytes):g}. "
        )
        caption += nodes.literal(text=f"{command} -o {name}.svg")
        return [picture, caption]


def setup(app: Any) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("schedule-picture", SchedulePicture)
    return {"parallel_read_safe": True}
