"""The values that every schedule is made of: actions, placements, costs, and what waits for what."""
