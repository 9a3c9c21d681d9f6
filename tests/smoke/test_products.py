"""Products through the commands: `credit rollout` writes them with forecasts, `credit products` from existing files."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

PRODUCTS = (
    "inference.products=[{kind: thickness, name: layer, of: [z850, z500], write: false}, "
    "{kind: probability, name: thick, of: layer, above: 4000 m}, {kind: spread, name: spread, of: t2m}, "
    "{kind: map, name: map, of: thick, lead_times: [12h]}]"
)
ENSEMBLE = "inference.ensemble={members: 3, perturbation: {kind: correlated}}"


@pytest.mark.slow
@pytest.mark.parametrize("format", ["netcdf", "zarr"])
def test_products_of_a_rollout(
    small_run: Path, command: Callable[..., subprocess.CompletedProcess], format: str
) -> None:
    config = small_run / "config.yml"
    assert command("train", config, "trainer.max_steps=1", "trainer.validate_every=1").returncode == 0
    options = [
        config, ENSEMBLE, "inference.initial_times=['2000-02-08', '2000-02-09']", "inference.lead_time=12h",
        f"inference.format={format}",
    ]  # fmt: skip
    forecasts = small_run / "run" / "forecasts"

    # A wrong product is refused before anything is computed.
    process = command("rollout", *options, PRODUCTS.replace("of: t2m", "of: t3m"))
    assert process.returncode == 2 and 'did you mean "t2m"' in process.stderr
    assert not list(forecasts.glob("*.nc"))

    process = command("rollout", *options, PRODUCTS)
    assert process.returncode == 0, process.stderr
    assert "6 products written, 0 already existed" in process.stdout
    folder = forecasts / "products" / "2000-02-09T00"
    assert sorted(path.name for path in folder.iterdir()) == ["map_012h.png", "products.json", "spread.nc", "thick.nc"]
    with xr.open_dataset(folder / "spread.nc") as dataset:
        spread = dataset["spread"].isel(time=-1).load()
    if format == "netcdf":
        with xr.open_dataset(forecasts / "forecast_2000-02-09T00.nc") as dataset:
            expected = dataset["t2m"].isel(time=-1).std("member", ddof=1)
            np.testing.assert_allclose(spread, expected, rtol=1e-4)

    # Neither command writes existing products again.
    process = command("rollout", *options, PRODUCTS)
    assert "0 products written, 6 already existed" in process.stdout
    process = command("products", *options, PRODUCTS)
    assert process.returncode == 0 and "0 products written, 6 already existed" in process.stdout
    process = command("products", *options)
    assert process.returncode == 2 and "inference.products" in process.stderr
