"""Reports on a plan."""
