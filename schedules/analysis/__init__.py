"""Timelines and what they show: idle time, critical path, drawings, traces."""
