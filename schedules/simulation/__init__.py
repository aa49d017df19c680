"""Simulation: from a schedule and its costs to a timeline and its memory."""
