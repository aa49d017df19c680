"""Makes a recomputed forward equal to the first: same random draws, same buffers."""
