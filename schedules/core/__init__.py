"""The values that schedules are made of, and the rule of what waits for what."""
