"""Cuts autograd graphs at stage borders, and splits backwards into input and weight gradients."""
