"""Splits mini-batches into micro-batches, and joins their outputs."""
