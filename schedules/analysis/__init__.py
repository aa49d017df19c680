"""Timelines and their analysis: idle time, critical path, drawings, traces."""
