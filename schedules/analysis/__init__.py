"""What a timeline shows: idle time, critical path, drawings, traces."""
