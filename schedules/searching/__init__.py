"""Searches for short schedules of unequal stages, and lower bounds."""
