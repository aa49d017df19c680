"""Compares a plan with measured steps and with the current model, and plans again with measured costs."""
