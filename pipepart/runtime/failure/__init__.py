"""Failures of a step: finds the layer, stage and device, and reports them to the caller."""
