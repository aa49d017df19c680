"""Transports: carry the messages of one step between workers."""
