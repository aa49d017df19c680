"""Heuristics that find good cuts of a graph, without a proof of optimality."""
