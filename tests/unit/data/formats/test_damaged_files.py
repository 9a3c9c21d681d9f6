"""Tests of netCDF files that are truncated or have another content."""

from __future__ import annotations

from pathlib import Path

import netCDF4
import numpy as np
import pytest
import xarray as xr

from credit.data.formats.netcdf3 import count_missing_bytes
from credit.data.sources.source_reader import open_sources
from credit.errors import DataError
from tests.unit.data.files_on_the_fly import make_config, random_fields, write_file

H, W = 8, 16


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.nc", {"t2m": random_fields(40, 32, 64)}, hours=range(0, 240, 6))
    complete_file = path.read_bytes()
    for name, content in {
        "half.nc": complete_file[: len(complete_file) // 2],
        "empty.nc": b"",
        "text.nc": b"<html>502 Bad Gateway</html>",
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"{name}: cannot be read as a netCDF file"):
            open_sources(make_config(tmp_path / name, p2=["t2m"]))


@pytest.mark.parametrize("kind", ["NETCDF3_CLASSIC", "NETCDF3_64BIT_OFFSET", "NETCDF3_64BIT_DATA"])
@pytest.mark.parametrize("unlimited", [[], ["time"]])
@pytest.mark.parametrize("names", [["t2m"], ["t2m", "mask"]])
def test_truncated_classic_file_is_refused(tmp_path: Path, kind: str, unlimited: list[str], names: list[str]) -> None:
    """The netCDF library itself would read zeros for the missing bytes."""
    fields = {"t2m": random_fields(3, H, W), "mask": random_fields(3, H, W)}
    write_file(tmp_path / "a.nc", {name: fields[name] for name in names}, hours=[0, 6, 12])
    path = tmp_path / "classic.nc"
    with xr.open_dataset(tmp_path / "a.nc", decode_times=False) as dataset:
        # A second variable has one byte per value.
        dataset = dataset.assign(mask=dataset["mask"].astype("i1")) if "mask" in names else dataset
        dataset.to_netcdf(path, format=kind, unlimited_dims=unlimited, engine="netcdf4")
    assert count_missing_bytes(path) == 0
    np.testing.assert_array_equal(open_sources(make_config(path, p2=["t2m"])).read(2)[0], fields["t2m"][2])
    content = path.read_bytes()
    for cut in (8, 300, len(content) // 2):
        (tmp_path / "cut.nc").write_bytes(content[:-cut] if cut != 300 else content[:cut])
        with pytest.raises(DataError, match=r"cut\.nc: cannot be read as a netCDF file"):
            open_sources(make_config(tmp_path / "cut.nc", p2=["t2m"]))


@pytest.mark.parametrize("name", ["hgt.nc", "2t.nc", "vinth2p.nc", "z_20140801.nc", "ERA_Interim_2017a.nc"])
def test_complete_classic_file_has_no_missing_bytes(shared_data: Path, name: str) -> None:
    assert count_missing_bytes(shared_data / "ingest" / name) == 0


@pytest.mark.parametrize("key", ["scale_factor", "add_offset"])
@pytest.mark.parametrize("name", ["t2m", "lat", "time"])
def test_text_in_a_packing_attribute_is_reported(tmp_path: Path, key: str, name: str) -> None:
    fields = {"t2m": random_fields(4, H, W), "u10": random_fields(4, H, W)}
    path = write_file(tmp_path / "a.nc", fields, packed={"t2m": 0.01})
    with netCDF4.Dataset(path, "a") as file:
        file[name].setncattr(key, "0.1")
    with pytest.raises(DataError, match=rf"a\.nc: the attribute {key} of {name} is '0\.1', but it must be one number"):
        open_sources(make_config(path, p2=["t2m"]))
    # Wrong packing of a variable that is not read does not matter.
    if name == "t2m":
        assert (open_sources(make_config(path, p2=["u10"])).read(1)[0] == fields["u10"][1]).all()
