"""Checks that say why a schedule cannot run."""
