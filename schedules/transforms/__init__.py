"""Functions that take a schedule and return a changed one."""
