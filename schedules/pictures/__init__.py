"""Pictures of timelines, in the style of papers, as SVG or text."""
