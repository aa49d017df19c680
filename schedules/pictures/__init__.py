"""Pictures of timelines, as papers print them: laid out once, written as SVG or as PNG."""
