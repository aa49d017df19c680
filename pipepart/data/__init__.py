"""Splits mini-batches into micro-batches, prefetches them and copies them to their devices."""
