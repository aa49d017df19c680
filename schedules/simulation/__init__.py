"""From a schedule and costs to a timeline and its memory."""
