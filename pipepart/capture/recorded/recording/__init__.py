"""Runs a forward and records it; decides which modules stay whole, and refuses what cannot be replayed."""
