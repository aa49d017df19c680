"""Passes over schedules: each function takes a schedule and returns a changed one."""
