"""How messages travel between the workers of one step."""
