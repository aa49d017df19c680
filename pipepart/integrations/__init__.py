"""Pipelines inside the trainers of other libraries; each module needs its library, and only once it is imported."""
