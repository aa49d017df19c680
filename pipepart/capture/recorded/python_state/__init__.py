"""The Python values that a model and its code hold: where they are, what changes them, and keys to compare them."""
