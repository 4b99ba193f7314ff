"""The site: Markdown pages (MyST), the look of Furo, and an API page from docstrings. ``make docs`` builds it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from lather import __version__

project = "lather"
author = "the lather authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3  # headings can be linked to, and a link to one that does not exist is a warning
nitpicky = True

autodoc_member_order = "bysource"
autodoc_typehints = "none"
default_role = "literal"  # `x` in docstrings is code
toc_object_entries = False

html_theme = "furo"
html_title = "lather"
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["tables.css"]
templates_path: list[str] = []
