"""Loading a config and showing help are fast: they import neither torch nor packages that read data."""

from __future__ import annotations

import subprocess
import sys

import pytest

SLOW_PACKAGES = ("torch", "xarray", "zarr", "scipy", "matplotlib")

LOAD_STARTER = """
from importlib.resources import files

from credit.config import load_config

load_config(files("credit.config") / "templates" / "quickstart.yml")
"""

SHOW_HELP = """
from credit.cli.main import main

try:
    main(["--help"])
except SystemExit:
    pass
"""


@pytest.mark.parametrize("script", [LOAD_STARTER, SHOW_HELP], ids=["load_config", "credit --help"])
def test_no_slow_package_is_imported(script: str) -> None:
    report = f"\nimport sys\nprint('imported:', [name for name in {SLOW_PACKAGES} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script + report], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "imported: []"
