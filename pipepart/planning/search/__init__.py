"""The choice among schedules, micro-batches, recompute and cuts."""
