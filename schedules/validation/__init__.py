"""Checks that say why a schedule is impossible."""
