"""Actions, schedules, costs, and the rule of dependencies between actions."""
