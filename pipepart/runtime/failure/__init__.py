"""Failures of a step: who failed, where, and what the caller is told."""
