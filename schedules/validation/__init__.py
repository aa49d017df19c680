"""Checks that a schedule can run, and explains why not."""
