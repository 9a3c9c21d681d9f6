"""Ensembles with one file for each member."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import netCDF4
import numpy as np
import pytest
import xarray as xr

from credit.calendar import Calendar
from credit.config.sections.inference import InferenceConfig
from credit.errors import ConfigError, DataError
from credit.forecast.io.forecast_reader import open_forecasts
from credit.forecast.io.forecast_writer import ForecastWriter
from tests.unit.forecast.test_forecast_writer import INITIAL, LEADS, NAMES, make_writer, random_fields

FIRST, SECOND = (Calendar().parse(text) for text in INITIAL)
MEMBERS = 3
FILES = [f"forecast_2001-04-01T00_member00{member}.nc" for member in range(MEMBERS)]


def write_ensemble(folder: Path, initial: int = FIRST, **options: object) -> ForecastWriter:
    """Write an ensemble; at each lead time, write the members from the last to the first."""
    writer = make_writer(folder, **{"members": MEMBERS, **options})
    for number in range(len(LEADS)):
        for member in reversed(range(MEMBERS)):
            writer.put(initial, number, random_fields(member)[number], member)
    return writer


def test_file_has_a_scalar_member_coordinate(tmp_path: Path) -> None:
    write_ensemble(tmp_path, split="member")
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    with xr.open_dataset(tmp_path / FILES[2]) as dataset:
        assert dataset["t"].dims == ("time", "level", "latitude", "longitude") and dataset.attrs["members"] == MEMBERS
        assert dataset["member"].ndim == 0 and dataset["member"] == 2
        assert "member" in dataset["t"].coords and dataset["member"].attrs["standard_name"] == "realization"
        np.testing.assert_array_equal(dataset["t"].sel(level=500.0), random_fields(2)[:, NAMES.index("t500")])


def test_combined_member_files_equal_the_ensemble_file(tmp_path: Path) -> None:
    write_ensemble(tmp_path / "apart", split="member")
    write_ensemble(tmp_path / "whole")
    paths = [tmp_path / "apart" / name for name in FILES]
    with (
        xr.open_mfdataset(paths, combine="nested", concat_dim="member") as combined,
        xr.open_dataset(tmp_path / "whole" / "forecast_2001-04-01T00.nc") as expected,
    ):
        assert combined["member"].values.tolist() == [0, 1, 2]
        for name in expected.data_vars:
            if "member" in expected[name].dims:
                np.testing.assert_array_equal(combined[name].transpose(*expected[name].dims), expected[name])


def test_members_attribute_does_not_change_an_ensemble_file(tmp_path: Path) -> None:
    """Other programs may write this attribute, and it remains after a concatenation of member files."""
    write_ensemble(tmp_path)
    path = next(tmp_path.iterdir())
    expected = open_forecasts(tmp_path).read(FIRST)
    with netCDF4.Dataset(path, "a") as dataset:
        dataset.members = MEMBERS
    archive = open_forecasts(tmp_path)
    assert archive.members == MEMBERS
    np.testing.assert_array_equal(archive.read(FIRST), expected)


def test_files_without_seen_periods_are_of_the_same_run(tmp_path: Path) -> None:
    write_ensemble(tmp_path)
    write_ensemble(tmp_path, SECOND)
    with netCDF4.Dataset(tmp_path / "forecast_2001-04-01T00.nc", "a") as dataset:
        dataset.seen_periods = "1999-01-01T00:00/1999-12-31T23:59"
    assert make_writer(tmp_path, members=MEMBERS).is_complete(FIRST)
    assert len(open_forecasts(tmp_path).initial_minutes) == 2


@pytest.mark.parametrize("options", [{}, {"keep_bits": 9, "compression": 1}])
def test_member_files_are_read_as_one_ensemble(tmp_path: Path, options: dict) -> None:
    for split, folder in (("member", tmp_path / "apart"), (None, tmp_path / "whole")):
        for initial in (FIRST, SECOND):
            write_ensemble(folder, initial, split=split, **options)
    member_files, ensemble_file = open_forecasts(tmp_path / "apart"), open_forecasts(tmp_path / "whole")
    assert (
        member_files.members == ensemble_file.members == MEMBERS
        and member_files.channel_names == ensemble_file.channel_names
    )
    assert member_files.initial_minutes.tolist() == [FIRST, SECOND] and member_files.lead_minutes.tolist() == LEADS
    for number in range(len(LEADS)):
        np.testing.assert_array_equal(
            member_files.read_members(SECOND, number), ensemble_file.read_members(SECOND, number)
        )
    np.testing.assert_array_equal(member_files.read(FIRST), ensemble_file.read(FIRST))


def test_run_continues_with_missing_members(tmp_path: Path) -> None:
    write_ensemble(tmp_path, split="member")
    expected_files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    resumed_writer = make_writer(tmp_path, members=MEMBERS, split="member")
    assert resumed_writer.is_complete(FIRST)
    (tmp_path / FILES[1]).unlink()
    with pytest.raises(DataError, match=r"lacks 3 of 9 lead times .first missing: 6 h of member 1.; run"):
        open_forecasts(tmp_path)
    assert not resumed_writer.is_complete(FIRST)
    shutil.copy(tmp_path / FILES[2], tmp_path / FILES[1])
    assert not resumed_writer.is_complete(FIRST), "the file of another member is not that of this"
    with pytest.raises(DataError, match=r"member002.nc: has the same lead times as .*member001.nc"):
        open_forecasts(tmp_path)
    write_ensemble(tmp_path, split="member")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == expected_files


def test_member_files_of_a_larger_ensemble_are_removed(tmp_path: Path) -> None:
    write_ensemble(tmp_path, split="member")
    smaller = make_writer(tmp_path, members=2, split="member")
    assert not smaller.is_complete(FIRST)
    for number, member in np.ndindex(len(LEADS), 2):
        smaller.put(FIRST, number, random_fields(member)[number], member)
    assert smaller.is_complete(FIRST) and open_forecasts(tmp_path).members == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES[:2]


def test_ensembles_of_two_splits_are_refused(tmp_path: Path) -> None:
    write_ensemble(tmp_path, split="member")
    with pytest.raises(ConfigError, match=r"inference.split: none does not match .*_member000.nc, .* member"):
        make_writer(tmp_path, members=MEMBERS)
    write_ensemble(tmp_path / "whole", SECOND)
    shutil.copy(tmp_path / "whole" / "forecast_2001-04-02T0030.nc", tmp_path)
    with pytest.raises(DataError, match="has a different number of members"):
        open_forecasts(tmp_path)


def test_a_member_file_without_its_number_is_refused(tmp_path: Path) -> None:
    """The renamed file is the last one; its number of members would be taken for that of all files."""
    write_ensemble(tmp_path, split="member")
    with xr.open_dataset(tmp_path / FILES[0], decode_times=False) as dataset:
        dataset.drop_vars("member").to_netcdf(tmp_path / "forecast_2001-04-01T00_renamed.nc")
    (tmp_path / FILES[0]).unlink()
    with pytest.raises(DataError, match="renamed.nc: has a different number of members, unlike .*member001.nc"):
        open_forecasts(tmp_path)


def test_split_by_member_requires_an_ensemble() -> None:
    with pytest.raises(ValueError, match="split: member is only for ensembles; set ensemble, or a different split"):
        InferenceConfig(split="member")


@pytest.mark.skipif(shutil.which("cdo") is None, reason="CDO is not installed")
def test_cdo_reads_all_variables_of_members_and_their_mean(tmp_path: Path) -> None:
    write_ensemble(tmp_path, split="member")
    write_ensemble(tmp_path / "whole")

    def run_cdo(*arguments: object) -> str:
        command = ["cdo", "-s", "-w", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    files = [tmp_path / name for name in FILES]
    assert run_cdo("showname", files[0]).split() == ["t", "u", "z", "t2m", "sst", "tp"]
    assert run_cdo("showname", tmp_path / "whole" / "forecast_2001-04-01T00.nc").split() == ["t2m", "sst", "tp"]
    run_cdo("ensmean", *files, tmp_path / "mean.nc")
    expected = np.mean([random_fields(member)[:, :3] for member in range(MEMBERS)], axis=0)
    with netCDF4.Dataset(tmp_path / "mean.nc") as dataset:
        np.testing.assert_allclose(dataset["t"][:], expected, atol=1e-6)
