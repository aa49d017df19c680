"""Records the forward of any module as a list of calls to functions and submodules, and replays it layer by layer."""
