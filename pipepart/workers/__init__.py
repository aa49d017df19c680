"""Worker threads, one for each device, and the torch modes that they inherit from the caller."""
