"""The section of the report with the layer graph."""

from .views import graph_section

__all__ = ["graph_section"]
