"""State that outlives a step: shared parameters, replicas, BatchNorm statistics, optimizers, weight versions."""
