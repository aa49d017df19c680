"""From mini-batches to micro-batches on their devices."""
