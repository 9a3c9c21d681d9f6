"""Sharding, spectral norm and LoRA work in a process that has neither the weather packages nor the config."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REFUSED = ("xarray", "netCDF4", "zarr", "dask", "numba", "pandas", "matplotlib", "pydantic", "yaml", "credit.config")

# An import of a module whose entry is None raises ModuleNotFoundError.
SCRIPT = """
import sys

for name in {refused!r}:
    sys.modules[name] = None
{code}
"""

MODULES = """
import importlib
import pathlib

import credit.parallel

folder = pathlib.Path(credit.parallel.__path__[0])
for path in sorted(folder.rglob("*.py")):
    parts = path.relative_to(folder.parents[1]).with_suffix("").parts
    importlib.import_module(".".join(parts).removesuffix(".__init__"))
"""

USE = """
import torch
from torch import nn

from credit.models.lora import apply_lora
from credit.models.layers.spectral_norm import apply_spectral_norm
from credit.parallel.parallelize import parallelize
from credit.parallel.reduce import clip_grad_norm_

class Block(nn.Linear):
    _fsdp2_shard = True

torch.manual_seed(0)
model = nn.Sequential(Block(4, 8), nn.GELU(), nn.Linear(8, 4))
apply_spectral_norm(model)
apply_lora(model, ["2"], rank=2, alpha=4.0)
parallelize(model, None, checkpoint=True)
model(torch.randn(3, 4)).square().mean().backward()
assert clip_grad_norm_(model.parameters(), 1.0).item() > 0
"""


@pytest.mark.parametrize("code", [MODULES, USE], ids=["every module of credit.parallel", "a training step"])
def test_without_weather_packages_and_config(code: str) -> None:
    script = SCRIPT.format(refused=REFUSED, code=code)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_no_import_of_torchs_test_helpers() -> None:
    import credit.parallel

    for path in Path(credit.parallel.__path__[0]).rglob("*.py"):
        assert "torch.testing" not in path.read_text(encoding="utf-8"), path
