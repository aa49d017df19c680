"""Records the forward of any module as calls of functions and of whole modules, and replays it layer by layer."""
