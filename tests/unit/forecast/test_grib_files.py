"""Forecasts in GRIB2 files, as ecCodes, cfgrib and CDO read them, and as this package reads them back."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import cfgrib
import eccodes
import numpy as np
import pytest
import xarray as xr

from credit.calendar import Calendar
from credit.config.sections.output import GribConfig
from credit.errors import ConfigError, CreditError, DataError
from credit.forecast.io.forecast_reader import open_forecasts
from credit.forecast.io.forecast_writer import ForecastWriter, require_same_format
from credit.forecast.io.grib.options import GribOptions
from credit.forecast.io.schema import SINCE_START
from tests.unit.forecast.test_forecast_writer import GRID, INITIAL, LEADS, MASK, NAMES, make_writer, random_fields

FIRST, SECOND = (Calendar().parse(text) for text in INITIAL)
NAME = "forecast_2001-04-01T00.grib2"
# Fields of `random_fields` lie within -5..5, so 16 bits have steps of at most 2^-12, and errors of half a step.
ERROR = 2.0**-13


def open_writer(folder: Path, conf: dict | None = None, has_control: bool = False, **options: object) -> ForecastWriter:
    grib = GribOptions(GribConfig(**(conf or {})), has_control=has_control)
    return make_writer(folder, **{"format": "grib2", "grib": grib, **options})


def read_messages(path: Path, keys: str) -> list[SimpleNamespace]:
    """Return the keys, and the values (H, W) with NaN where missing, of each message as ecCodes reads them."""
    messages = []
    with open(path, "rb") as file:
        while (handle := eccodes.codes_grib_new_from_file(file)) is not None:
            eccodes.codes_set(handle, "missingValue", -1e30)
            values = eccodes.codes_get_values(handle).reshape(GRID.shape)
            message = SimpleNamespace(values=np.where(values == -1e30, np.nan, values))
            for key in keys.split():
                setattr(message, key, eccodes.codes_get(handle, key))
            messages.append(message)
            eccodes.codes_release(handle)
    return messages


def test_eccodes_reads_parameters_levels_times_and_values(tmp_path: Path) -> None:
    fields = random_fields()
    conf = {"centre": "edzw", "sub_centre": 3, "generating_process": 12, "status": "operational"}
    path = open_writer(tmp_path, conf).write(SECOND, fields)
    assert path.name == "forecast_2001-04-02T0030.grib2"
    assert sorted(file.name for file in tmp_path.iterdir()) == [path.name, f"{path.name}.json"]
    keys = (
        "edition centre subCentre generatingProcessIdentifier productionStatusOfProcessedData shortName typeOfLevel "
        "level dataDate dataTime validityDate validityTime stepRange stepType units packingType "
        "significanceOfReferenceTime"
    )
    messages = read_messages(path, keys)
    assert len(messages) == len(LEADS) * len(NAMES)
    first = messages[0]
    assert (first.edition, first.centre, first.subCentre, first.generatingProcessIdentifier) == (2, "edzw", 3, 12)
    assert (first.productionStatusOfProcessedData, first.significanceOfReferenceTime) == (0, 1)
    assert {message.packingType for message in messages} == {"grid_ccsds"}
    short_names = {"t2m": "2t", "t850": "t", "u250": "u", "z500": "z", "sst": "sst", "tp": "tp"}
    levels = {"t2m": ("heightAboveGround", 2), "sst": ("surface", 0), "tp": ("surface", 0)}
    units = {"t2m": "K", "sst": "K", "tp": "kg m**-2", "z500": "m**2 s**-2", "u250": "m s**-1"}
    for lead_index, lead in enumerate(LEADS):
        for channel_index, name in enumerate(NAMES):
            message = messages[lead_index * len(NAMES) + channel_index]
            assert message.shortName == short_names.get(name, name[0])
            level = levels.get(name) or ("isobaricInhPa", int(name[1:]))
            assert (message.typeOfLevel, message.level) == level
            assert message.units == units.get(name, message.units)
            assert (message.dataDate, message.dataTime) == (20010402, 30)
            valid = Calendar().datetime(SECOND + lead)
            assert message.validityDate == int(valid.strftime("%Y%m%d"))
            assert message.validityTime == int(valid.strftime("%H%M"))
            expected = fields[lead_index, channel_index]
            if name == "sst":
                expected = np.where(MASK, np.nan, expected)
            np.testing.assert_allclose(message.values, expected, rtol=0, atol=ERROR)
            if name == "tp":
                assert (message.stepType, message.stepRange) == ("accum", f"{lead // 60 - 6}-{lead // 60}")
            else:
                assert (message.stepType, message.stepRange) == ("instant", f"{lead // 60}")


def test_cfgrib_reads_names_coordinates_and_values(tmp_path: Path) -> None:
    fields = random_fields()
    path = open_writer(tmp_path).write(FIRST, fields)
    datasets = cfgrib.open_datasets(path, backend_kwargs={"indexpath": ""})
    variables = {name: dataset[name] for dataset in datasets for name in dataset.data_vars}
    assert {*variables} == {"t", "u", "z", "t2m", "sst", "tp"}
    temperature = variables["t"]
    assert temperature.attrs["units"] == "K" and temperature.attrs["standard_name"] == "air_temperature"
    np.testing.assert_array_equal(temperature["isobaricInhPa"], [850.0, 500.0, 250.0])
    np.testing.assert_array_equal(temperature["latitude"], GRID.lat)
    np.testing.assert_array_equal(temperature["longitude"], GRID.lon)
    assert temperature["time"] == np.datetime64("2001-04-01T00:00")
    np.testing.assert_array_equal(temperature["step"] / np.timedelta64(1, "m"), LEADS)
    for name, level in {"t850": 850.0, "t250": 250.0}.items():
        expected = fields[:, NAMES.index(name)]
        np.testing.assert_allclose(temperature.sel(isobaricInhPa=level), expected, rtol=0, atol=ERROR)
    assert np.isnan(variables["sst"].values[:, MASK]).all() and not np.isnan(variables["sst"].values[:, ~MASK]).any()
    np.testing.assert_allclose(variables["tp"], fields[:, NAMES.index("tp")], rtol=0, atol=ERROR)
    np.testing.assert_array_equal(variables["t2m"]["heightAboveGround"], 2.0)


@pytest.mark.parametrize(
    ("window", "ranges"),
    [(1440, ["0-24"]), (SINCE_START, ["0-6", "0-12", "0-24"]), (720, ["0-12", "12-24"])],
)
def test_sums_have_their_windows(tmp_path: Path, window: int, ranges: list[str]) -> None:
    fields = random_fields()
    path = open_writer(tmp_path, variables=["tp"], windows={"tp": window}).write(FIRST, fields)
    keys = "stepRange startStep endStep typeOfStatisticalProcessing lengthOfTimeRange productDefinitionTemplateNumber"
    messages = read_messages(path, keys)
    assert [message.stepRange for message in messages] == ranges
    assert {message.typeOfStatisticalProcessing for message in messages} == {1}
    assert {message.productDefinitionTemplateNumber for message in messages} == {8}
    # A sum whose window begins before the initial time is missing; GRIB2 has no message for it.
    forecast = open_forecasts(tmp_path).read(FIRST)
    assert np.isnan(forecast[: len(LEADS) - len(ranges)]).all()
    last = len(LEADS) - len(ranges)
    np.testing.assert_allclose(forecast[last:, 0], fields[last:, NAMES.index("tp")], rtol=0, atol=ERROR)


def test_means_and_lead_times_in_minutes(tmp_path: Path) -> None:
    attributes = {"temporal": "mean", "units": "W m-2"}
    parameters = {"tp": {"parameter": "ssrd"}}
    writer = open_writer(
        tmp_path,
        {"parameters": parameters},
        variables=["t2m", "tp"],
        lead_minutes=[30, 90],
        windows={"tp": 30},
        attributes={"tp": attributes},
    )
    writer.write(FIRST, random_fields()[:2])
    keys = "shortName forecastTime indicatorOfUnitOfTimeRange stepRange validityTime typeOfStatisticalProcessing"
    messages = read_messages(tmp_path / NAME, keys.removesuffix(" typeOfStatisticalProcessing"))
    assert [message.validityTime for message in messages] == [30, 30, 130, 130]
    assert {message.indicatorOfUnitOfTimeRange for message in messages} == {0}
    assert [message.forecastTime for message in messages] == [30, 0, 90, 60]
    assert [message.stepRange for message in messages] == ["30m", "0m-30m", "90m", "60m-90m"]
    assert messages[1].shortName == "avg_sdswrf"


@pytest.mark.parametrize("has_control", [True, False])
def test_members_are_numbered(tmp_path: Path, has_control: bool) -> None:
    for folder, order in (("ordered", [0, 1, 2]), ("turned", [2, 0, 1])):
        writer = open_writer(tmp_path / folder, has_control=has_control, members=3)
        # A batch of members makes all its lead times before the next batch.
        for member in order:
            for lead_index in range(len(LEADS)):
                writer.put(FIRST, lead_index, random_fields(member)[lead_index], member)
        assert writer.is_complete(FIRST)
    assert (tmp_path / "ordered" / NAME).read_bytes() == (tmp_path / "turned" / NAME).read_bytes()
    assert not [path for path in (tmp_path / "turned").iterdir() if "part" in path.name]
    keys = (
        "perturbationNumber numberOfForecastsInEnsemble productDefinitionTemplateNumber typeOfEnsembleForecast "
        "typeOfProcessedData typeOfGeneratingProcess stepType"
    )
    messages = read_messages(tmp_path / "turned" / NAME, keys)
    assert [message.perturbationNumber for message in messages[:: len(NAMES)]] == [0, 1, 2] * len(LEADS)
    assert {message.numberOfForecastsInEnsemble for message in messages} == {3}
    assert {message.typeOfGeneratingProcess for message in messages} == {4}
    for message in messages:
        is_control = has_control and message.perturbationNumber == 0
        assert message.typeOfEnsembleForecast == (1 if is_control else 3)
        assert message.typeOfProcessedData == ("cf" if is_control else "pf")
        assert message.productDefinitionTemplateNumber == (11 if message.stepType == "accum" else 1)
    # As with the forecasts of ECMWF, control and perturbed members have different data types.
    keys = {"shortName": "t", "dataType": "pf"}
    with xr.open_dataset(tmp_path / "turned" / NAME, engine="cfgrib", indexpath="", filter_by_keys=keys) as dataset:
        assert dataset["t"].dims == ("number", "step", "isobaricInhPa", "latitude", "longitude")
        expected = random_fields(2)[:, NAMES.index("t500")]
        np.testing.assert_allclose(dataset["t"].sel(number=2, isobaricInhPa=500.0), expected, rtol=0, atol=ERROR)


@pytest.mark.parametrize("split", [None, "day", "lead", "member"])
def test_forecasts_are_read_as_from_netcdf(tmp_path: Path, split: str | None) -> None:
    conf = {"parameters": {"z": {"parameter": "gh"}}, "precision": {"z": 0.01}}
    for writer in (
        make_writer(tmp_path / "netcdf", members=2, split=split),
        open_writer(tmp_path / "grib2", conf, members=2, split=split),
    ):
        for initial in (FIRST, SECOND):
            for member in range(2):
                for lead_index in range(len(LEADS)):
                    writer.put(initial, lead_index, 10 * random_fields(member)[lead_index], member)
    expected, archive = open_forecasts(tmp_path / "netcdf"), open_forecasts(tmp_path / "grib2")
    assert archive.channel_names == expected.channel_names and archive.units == expected.units
    assert archive.attributes == expected.attributes and archive.cell_methods == expected.cell_methods
    assert archive.members == expected.members == 2 and archive.calendar == expected.calendar
    assert archive.grid.describe_mismatch(expected.grid) is None
    np.testing.assert_array_equal(archive.initial_minutes, expected.initial_minutes)
    np.testing.assert_array_equal(archive.lead_minutes, expected.lead_minutes)
    fields_MCHW, expected_MCHW = archive.read_members(SECOND, 1), expected.read_members(SECOND, 1)
    np.testing.assert_array_equal(np.isnan(fields_MCHW), np.isnan(expected_MCHW))
    difference_C = np.nanmax(np.abs(fields_MCHW - expected_MCHW), axis=(0, 2, 3))
    z_index = archive.channel_names.index("z500")
    # The largest error of z is 0.01 m2 s-2, although z is stored as a height in m.
    assert 0.001 < difference_C[z_index] <= 0.01
    assert np.delete(difference_C, z_index).max() < 10 * ERROR


@pytest.mark.parametrize("packing", ["simple", "ccsds"])
@pytest.mark.parametrize("precision", [0.5, 0.01, 3e-4])
def test_precision_is_kept(tmp_path: Path, packing: str, precision: float) -> None:
    fields = 1000 * random_fields()
    conf = {"packing": packing, "precision": {"t": precision}}
    path = open_writer(tmp_path, conf, variables=["t"]).write(FIRST, fields)
    messages = read_messages(path, "bitsPerValue")
    expected = fields[:, [NAMES.index(name) for name in ("t850", "t500", "t250")]].reshape(-1, *GRID.shape)
    for message, field in zip(messages, expected, strict=True):
        error = np.abs(message.values - field).max()
        assert error <= precision
        # With one bit fewer the error would be too large: the step is the largest power of 2 with this error.
        assert np.ptp(field) / (2 ** (message.bitsPerValue - 1) - 1) > precision


def test_constant_and_empty_fields(tmp_path: Path) -> None:
    fields = np.full_like(random_fields(), 7.25)
    fields[:, NAMES.index("u250")] = np.nan
    path = open_writer(tmp_path, {"precision": {"t2m": 0.1}}).write(FIRST, fields)
    messages = read_messages(path, "shortName level")
    for message in messages:
        if message.shortName == "u" and message.level == 250:
            assert np.isnan(message.values).all()
        else:
            assert np.nanmin(message.values) == np.nanmax(message.values) == 7.25


def test_only_the_same_forecast_is_complete(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    writer.write(FIRST, random_fields())
    assert writer.is_complete(FIRST) and open_writer(tmp_path).is_complete(FIRST)
    assert not open_writer(tmp_path).is_complete(SECOND)
    for conf in ({"bits": 12}, {"centre": 98}, {"precision": {"t": 0.1}}, {"parameters": {"z": {"parameter": "gh"}}}):
        assert not open_writer(tmp_path, conf).is_complete(FIRST)
    assert not open_writer(tmp_path, global_attributes={"checkpoint_step": 8}).is_complete(FIRST)
    assert not open_writer(tmp_path, variables=["t"]).is_complete(FIRST)
    assert not open_writer(tmp_path, lead_minutes=[360, 720]).is_complete(FIRST)
    assert not open_writer(tmp_path, initial_state_checksum=lambda _: "0" * 16).is_complete(FIRST)
    content = (tmp_path / NAME).read_bytes()
    (tmp_path / NAME).write_bytes(content[:-1])
    assert not writer.is_complete(FIRST)
    with pytest.raises(DataError, match=r"2001-04-01T00.grib2: has \d+ bytes instead of \d+; run credit rollout again"):
        open_forecasts(tmp_path)
    (tmp_path / NAME).write_bytes(content)
    assert writer.is_complete(FIRST)
    (tmp_path / f"{NAME}.json").unlink()
    assert not writer.is_complete(FIRST)
    with pytest.raises(DataError, match="the index forecast_2001-04-01T00.grib2.json is missing.*convert forecasts"):
        open_forecasts(tmp_path)
    # The forecast is repeated with the same bytes.
    open_writer(tmp_path).write(FIRST, random_fields())
    assert (tmp_path / NAME).read_bytes() == content and writer.is_complete(FIRST)


def test_killed_between_file_and_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index of the replaced forecast must not remain next to the new file."""
    open_writer(tmp_path).write(FIRST, random_fields(0))
    index = (tmp_path / f"{NAME}.json").read_bytes()

    def raise_interrupt(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    writer = open_writer(tmp_path)
    monkeypatch.setattr("credit.forecast.io.grib.grib_format.flush_and_rename", raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        writer.write(FIRST, random_fields(1))
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert not writer.is_complete(FIRST)
    open_writer(tmp_path).write(FIRST, random_fields(0))
    assert (tmp_path / f"{NAME}.json").read_bytes() == index


def test_temporary_files_of_a_process_killed_in_the_last_step_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While messages are sorted, a second temporary file exists."""

    def raise_interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    writer = open_writer(tmp_path, members=2)
    monkeypatch.setattr("credit.forecast.io.grib.grib_format.os.replace", raise_interrupt)
    # A killed process removes nothing.
    monkeypatch.setattr("credit.forecast.io.grib.grib_format._GribFile.discard", lambda self: None)
    with pytest.raises(KeyboardInterrupt):
        for member in (1, 0):
            for lead_index in range(len(LEADS)):
                writer.put(FIRST, lead_index, random_fields(member)[lead_index], member)
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr("credit.forecast.io.files.writer.process_exists", lambda process: False)
    open_writer(tmp_path, members=2)
    assert not list(tmp_path.iterdir())


def test_error_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = open_writer(tmp_path, split="lead")
    fields = random_fields()
    writer.put(FIRST, 0, fields[0])
    assert len(list(tmp_path.iterdir())) == 2

    def raise_disk_full(*_: object) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("credit.forecast.io.grib.messages.MessageEncoder.encode", raise_disk_full)
    with pytest.raises(CreditError, match=r"forecast_2001-04-01T00_012h.grib2: cannot be written \(No space left"):
        writer.put(FIRST, 1, fields[1])
    assert not list(tmp_path.iterdir())


def test_other_formats_in_the_folder_are_refused(tmp_path: Path) -> None:
    open_writer(tmp_path / "grib2").write(FIRST, random_fields())
    make_writer(tmp_path / "netcdf").write(FIRST, random_fields())
    for format, folder in (("netcdf", "grib2"), ("zarr", "grib2"), ("grib2", "netcdf")):
        with pytest.raises(ConfigError, match=f"inference.format: {format} does not match .* with {folder}"):
            require_same_format(tmp_path / folder, format, None)
    with pytest.raises(ConfigError, match="inference.split: lead does not match .*grib2, which a run with none"):
        require_same_format(tmp_path / "grib2", "grib2", "lead")
    shutil.copy(tmp_path / "netcdf" / "forecast_2001-04-01T00.nc", tmp_path / "grib2")
    with pytest.raises(DataError, match="contains netcdf files and grib2 files; remove the forecasts"):
        open_forecasts(tmp_path / "grib2")


@pytest.mark.skipif(shutil.which("cdo") is None, reason="CDO is not installed")
def test_cdo_reads_times_levels_and_values(tmp_path: Path) -> None:
    fields = random_fields()
    path = open_writer(tmp_path).write(FIRST, fields)

    def run_cdo(*arguments: str) -> list[str]:
        process = subprocess.run(["cdo", "-s", *arguments, str(path)], capture_output=True, text=True, check=True)
        return process.stdout.split()

    assert run_cdo("showtimestamp") == ["2001-04-01T06:00:00", "2001-04-01T12:00:00", "2001-04-02T00:00:00"]
    assert run_cdo("showlevel", "-selname,t") == ["85000", "50000", "25000"]
    assert {*run_cdo("showname")} == {"t", "u", "z", "2t", "sst", "tp"}
    largest = float(run_cdo("output", "-fldmax", "-selname,2t", "-seltimestep,1")[0])
    assert largest == pytest.approx(fields[0, NAMES.index("t2m")].max(), abs=ERROR)
