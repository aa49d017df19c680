"""The plan as a value: the fields of its file, and the stages, the schedule and the figures that follow from them."""
