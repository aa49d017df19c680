"""Runs a schedule in one process, with one worker thread per device."""
