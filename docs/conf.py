"""Sphinx configuration."""

from __future__ import annotations

import sys
import zlib
from importlib.metadata import version as installed
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

project = "pipepart"
author = "pipepart contributors"
project_copyright = "2026, pipepart contributors"
release = version = installed("pipepart")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "command_help",
    "schedule_picture",
]
exclude_patterns = ["_build", "_ext"]
myst_enable_extensions = ["colon_fence", "dollarmath", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say what matters
napoleon_google_docstring = True
napoleon_use_rtype = False

# The build reads no network: the names of torch that the pages refer to stand in a file.
_inventory = HERE / "_build" / "torch.inv"
_inventory.parent.mkdir(exist_ok=True)
_header = "# Sphinx inventory version 2\n# Project: torch\n# Version: stable\n"
_header += "# The remainder of this file is compressed using zlib.\n"
_names = (HERE / "torch_names.txt").read_text(encoding="utf-8")
_inventory.write_bytes(_header.encode() + zlib.compress(_names.encode()))
intersphinx_mapping = {"torch": ("https://docs.pytorch.org/docs/stable/", str(_inventory))}

html_theme = "pydata_sphinx_theme"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_title = "pipepart"
html_sidebars = {"getting-started": []}  # the only page without a section
html_theme_options = {
    "show_prev_next": True,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True
