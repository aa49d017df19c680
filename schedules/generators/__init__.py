"""Schedules of the literature, one family per file."""
