"""Scripts to learn from: run them as ``python -m examples.NAME``."""
