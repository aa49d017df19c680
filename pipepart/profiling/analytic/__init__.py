"""Estimates the costs of layers without running kernels: bytes on the meta device, seconds from a roofline."""
