"""Exact search over the downsets of a graph."""
