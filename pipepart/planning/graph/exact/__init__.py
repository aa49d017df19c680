"""Exact search for the best cut of a graph."""
