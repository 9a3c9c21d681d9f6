"""Sphinx configuration: `make docs` builds with -W -n, so every warning and every dead reference is an error."""

from credit import __version__

project = "credit"
author = "the credit developers"
copyright = author
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"credit {version}"
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # shapes and units stand in the docstrings; types in the source
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# Names of other packages are not looked up on the network, and config sections are described in config.md.
# Text before a colon in the docstring of a property is not a type.
nitpick_ignore_regex = [
    ("py:class", r"(collections|contextlib|numpy|pathlib|torch|xarray)\..*"),
    ("py:class", r"credit\.config\.sections\..*"),
    ("py:class", r".*\s.*"),
]
