"""Measures a step: times of actions and messages, and bytes saved for backwards."""
