"""Estimates costs of layers without running them: bytes on the meta device, seconds from a roofline."""
