"""Sphinx configuration: `make docs` builds with -W -n, so every warning and every dead reference is an error."""

import os
import sys
from pathlib import Path

from credit import __version__

project = "credit"
author = "the credit developers"
copyright = author
release = version = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"credit {version}"
exclude_patterns = ["_build", "notebooks/runs"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# The notebooks are stored without outputs and run during the build. They share the folder notebooks/runs, in which the
# first one to run trains a network; the others find it there. The builder may be started without its environment being
# active, so the command `credit` of this environment is put first.
nb_execution_mode = os.environ.get("NOTEBOOKS", "force")
nb_execution_raise_on_error = True
nb_execution_timeout = 1200
nb_merge_streams = True
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

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
