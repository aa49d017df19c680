"""Note on a plan whose file was edited: which figures were computed again."""

from __future__ import annotations

from rich.text import Text

from ...planning import Plan
from ...units import format_seconds
from .stage_names import stage_numbers


def edited_note(in_file: Plan, fresh: Plan) -> Text | None:
    """Say what changed in an edited plan file; None if nothing did.

    Args:
        in_file: with the figures that the file has.
        fresh: with those that follow from its stages and the profile in it.
    """
    changed = [
        number
        for number, (before, after) in enumerate(zip(in_file.stages, fresh.stages, strict=True))
        if before != after
    ]
    before, after = in_file.prediction, fresh.prediction
    if not changed and (before is None or after is None or before.step_seconds == after.step_seconds):
        return None
    what = f"stage{'s' if len(changed) > 1 else ''} {stage_numbers(changed)}" if changed else "the schedule"
    text = f"The file was edited: what {what} cost{'' if len(changed) > 1 else 's'} is computed again."
    if before is not None and after is not None:
        off = after.step_seconds / before.step_seconds - 1 if before.step_seconds else 0.0
        how = f"{abs(off):.1%} {'longer' if off > 0 else 'shorter'}" if abs(off) >= 0.0005 else "as before"
        text += (
            f" The step takes {format_seconds(after.step_seconds)}, {how}: "
            f"the file had {format_seconds(before.step_seconds)}."
        )
    return Text(text)
