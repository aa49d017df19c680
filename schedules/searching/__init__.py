"""Searches for schedules of unequal stages, and bounds on what any schedule can reach."""
