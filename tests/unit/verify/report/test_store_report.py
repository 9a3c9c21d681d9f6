"""Tests of the report on a store: it shows every channel and all problems, and has no external files."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit.config.sections.data import DataConfig
from credit.data.store.preprocess import write_training_store
from credit.errors import DataError
from credit.verify.report.store_report import write_data_report


@pytest.fixture
def data_config(tmp_path: Path) -> DataConfig:
    rng = np.random.default_rng(0)
    shape = (60, 8, 16)
    dims = ("time", "latitude", "longitude")
    t2m = rng.normal(288, 9, shape).astype(np.float32)
    rain = rng.gamma(0.3, 2.0, shape).astype(np.float32)
    # One value is missing.
    t2m[20, 3, 4] = np.nan
    land = (rng.random(shape[1:]) > 0.6).astype(np.float32)
    variables = {
        "t2m": (dims, t2m, {"units": "K"}),
        "rain": (dims, rain, {"units": "mm"}),
        "land": (dims[1:], land, {"units": "1", "standard_name": "land_area_fraction"}),
    }
    coords = {
        "time": ("time", np.arange(60) * 6.0, {"units": "hours since 2000-01-01", "standard_name": "time"}),
        "latitude": ("latitude", np.linspace(78.75, -78.75, 8), {"units": "degrees_north"}),
        "longitude": ("longitude", np.arange(16) * 22.5, {"units": "degrees_east"}),
    }
    xr.Dataset(variables, coords).to_netcdf(tmp_path / "a.nc")
    return DataConfig.model_validate(
        {
            "sources": [{"path": str(tmp_path / "a.nc")}],
            "variables": {
                "prognostic": {"vars_2D": ["t2m"]},
                "diagnostic": {"vars_2D": ["rain"]},
                "static": {"vars_2D": ["land"]},
            },
            "transforms": {"rain": {"kind": "log1p", "unit": 0.5}},
            "splits": {"train": ["2000-01-01", "2000-01-08"], "valid": ["2000-01-10"] * 2, "test": ["2000-01-12"] * 2},
            "split_gap": "1d",
            "store": str(tmp_path / "store.zarr"),
            "on_bad_time": "skip",
        }
    )


def test_the_report_shows_every_channel_and_all_problems(data_config: DataConfig) -> None:
    with pytest.raises(DataError, match="run credit preprocess"):
        write_data_report(data_config)
    write_training_store(data_config)
    # Earlier versions stored units without a check, so a store may have wrong ones.
    description = Path(data_config.store) / "zarr.json"
    description.write_text(description.read_text().replace('"units": "K"', '"units": "degC"'))
    page = write_data_report(data_config)
    assert page.name == "store.zarr.report.html"
    assert not list(page.parent.glob("*.part"))
    text = page.read_text(encoding="utf-8")
    pictures = [base64.b64decode(encoded_picture) for encoded_picture in re.findall(r'base64,([^"]+)"', text)]
    assert len(pictures) == 3
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert "2000-01-06T00:00 was left out: t2m" in text
    assert re.search(r"t2m at 2000-\S+: 128 of 128 values are outside the limits of temperature in degC", text)
    assert "log1p, unit 0.5" in text
    assert "2000-01-05T18:00 to 2000-01-06T06:00" in text
    for name in ("t2m", "rain", "land"):
        assert f"<td>{name}</td>" in text
    assert not re.search(r'(?:src|href)="(?!data:)', text), "nothing lies outside of the page"
