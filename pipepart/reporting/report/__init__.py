"""The report: one HTML file that shows plans and measured steps, and works offline."""

from .page import report_html, to_html
from .run import Run

__all__ = ["Run", "report_html", "to_html"]
