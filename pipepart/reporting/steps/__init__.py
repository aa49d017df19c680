"""Reports on simulated and measured steps."""
