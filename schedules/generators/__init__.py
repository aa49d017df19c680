"""Schedules of the literature, one family a file."""
