"""Cuts of a chain of layers into stages."""
