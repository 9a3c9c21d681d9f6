"""Tests of the times of a file that a source uses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit.data.formats.zarr.remote import read_remote_fingerprint
from credit.data.sources.source_reader import open_sources
from credit.errors import CreditError
from tests.unit.data.archives_on_the_fly import ArchiveServer, write_arco_era5
from tests.unit.data.files_on_the_fly import make_config, random_fields, write_file

pytestmark = pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")


def test_every_counts_from_midnight(tmp_path: Path) -> None:
    fields = random_fields(24, 8, 16)
    # The file begins at 03 UTC.
    write_file(tmp_path / "a.nc", {"t2m": fields}, np.arange(24) + 3)
    conf = make_config([], p2=["t2m"], sources=[{"path": str(tmp_path / "a.nc"), "every": "6h"}])
    reader = open_sources(conf)
    times = [reader.calendar.format(minutes) for minutes in reader.times]
    assert times == ["2000-01-01T06:00", "2000-01-01T12:00", "2000-01-01T18:00", "2000-01-02T00:00"]
    np.testing.assert_array_equal(reader.read(1)[0], fields[9])


def test_every_is_refused_for_means(tmp_path: Path) -> None:
    write_file(tmp_path / "a.nc", {"t2m": random_fields(24, 8, 16)}, np.arange(24))
    conf = make_config(
        [], p2=["t2m"], sources=[{"path": str(tmp_path / "a.nc"), "every": "6h"}],
        variable_options={"t2m": {"temporal": "mean"}},
    )  # fmt: skip
    with pytest.raises(CreditError, match=r"data.sources.0.every: t2m has temporal: mean.*second time without every"):
        open_sources(conf)


def test_times_beyond_the_stated_dates_are_left_out(tmp_path: Path) -> None:
    """ARCO-ERA5 has times from 1900 to 2050, and static fields with a time axis."""
    write_arco_era5(tmp_path / "arco", 48, ["2m_temperature", "land_sea_mask"])
    source = {"path": str(tmp_path / "arco"), "rename": {"t2m": "2m_temperature"}}
    reader = open_sources(make_config([], p2=["t2m"], static=["land_sea_mask"], sources=[source]))
    assert reader.calendar.format(reader.times[0]) == "2000-01-01T00:00"
    assert reader.calendar.format(reader.times[-1]) == "2000-01-02T23:00"
    assert np.isfinite(reader.static()).all()
    assert np.ptp(reader.static()) > 0.5


def test_attributes_that_are_not_dates_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Files of other programs may have attributes with the same names."""
    path = write_file(tmp_path / "a.nc", {"t2m": random_fields(8, 8, 16), "u10": random_fields(8, 8, 16)}, np.arange(8))
    with xr.open_dataset(path, decode_times=False) as dataset:
        dataset.attrs = {"valid_time_start": "20000101", "valid_time_stop": "2000-01-01T05:00"}
        dataset.to_netcdf(tmp_path / "b.nc")
    reader = open_sources(make_config(tmp_path / "b.nc", p2=["t2m", "u10"]))
    assert len(reader.times) == 6
    assert caplog.text.count('the attribute valid_time_start is ignored, because "20000101"') == 1


def test_fingerprint_ignores_the_growth_of_a_store(tmp_path: Path) -> None:
    path = write_arco_era5(tmp_path / "arco", 24, ["2m_temperature"])
    with ArchiveServer(tmp_path) as server:
        fingerprints = [read_remote_fingerprint(f"{server.url}/arco", {})]
        for old, new in (("2000-01-01", "2000-02-01"), ("2 metre temperature", "another")):
            text = (path / ".zmetadata").read_text()
            assert old in text
            (path / ".zmetadata").write_text(text.replace(f'"valid_time_stop": "{old}"', f'"valid_time_stop": "{new}"'))
            if old.startswith("2 m"):
                (path / ".zmetadata").write_text(text.replace(old, new))
            fingerprints.append(read_remote_fingerprint(f"{server.url}/arco", {}))
    assert fingerprints[0] == fingerprints[1]
    assert fingerprints[1] != fingerprints[2]
