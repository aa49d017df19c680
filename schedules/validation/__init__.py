"""Checks that a schedule can run, and explains why if it cannot."""
