"""Explains why no plan fits the memory, and suggests changes that would make one fit."""
