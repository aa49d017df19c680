"""Plan: the fields of a plan file, and the schedule, stages and predictions computed from them."""
