"""What measured steps and changed models say about a plan."""
