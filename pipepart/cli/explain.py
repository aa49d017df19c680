"""``pipepart explain``: a plan that was saved, as EXPLAIN shows the plan of a query."""

from __future__ import annotations

from . import options
from .mistakes import mistakes_told
from .output import deliver
from .reports import plan_reports
from .saved_plan import PlanFile, as_in_file, load_plan


def explain_command(plan: PlanFile, as_json: options.AsJson = False) -> None:
    """Shows a plan that was saved, edited or not.

    Its stages, memory, alternatives and predicted timeline. An edited file is checked, and what its stages cost is
    computed anew from the profile in it: the model is not needed.
    """
    with mistakes_told():
        made = load_plan(plan)
        before = as_in_file(plan)

        def reports():
            from ..reporting import edited_note

            edited = edited_note(before, made) if before else None
            return [*([edited] if edited else []), *plan_reports(made)]

        deliver(made, reports, as_json=as_json, path=None)
