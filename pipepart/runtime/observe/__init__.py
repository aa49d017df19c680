"""What a step measures of itself."""
