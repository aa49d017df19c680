"""Records a forward, chooses the modules recorded as single calls, and rejects code that cannot be replayed."""
