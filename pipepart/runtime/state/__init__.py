"""Parameters, buffers and optimizers that outlive a step."""
