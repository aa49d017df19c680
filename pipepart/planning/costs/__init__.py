"""Computes the seconds and bytes of any range of layers as a stage."""
