"""A model that does not fit, as JSON: the reason, and changes that would make it fit."""

from __future__ import annotations

import json

from ..planning import InfeasiblePlanError


def infeasible_json(error: InfeasiblePlanError) -> str:
    """Return the error as JSON; seconds are of a step, bytes of the fullest device."""
    return json.dumps(
        {
            "error": "infeasible",
            "reason": str(error),
            "stage": error.stage,
            "deficit_bytes": error.deficit_bytes,
            "suggestions": [
                {
                    "change": suggestion.change,
                    "options": suggestion.options,
                    "devices": [device.name for device in suggestion.devices],
                    "estimated": suggestion.estimated,
                    "step_seconds": suggestion.step_seconds,
                    "memory_bytes": max(suggestion.plan.predicted.memory_bytes),
                }
                for suggestion in error.suggestions
            ],
        },
        indent=1,
    )
