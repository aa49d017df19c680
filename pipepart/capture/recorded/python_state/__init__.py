"""Finds and compares the Python values that a model and its code hold, and the changes of these values."""
