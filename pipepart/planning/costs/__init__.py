"""What any range of layers costs as a stage."""
