"""Tests of `score_forecasts` on forecasts with known errors."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import netCDF4
import numpy as np
import pytest
import xarray as xr
from scipy import special

from credit.cli.console.score_summary import format_summary
from credit.config import build_config
from credit.config.sections.verification import OtherForecastsConfig
from credit.errors import ConfigError, DataError
from credit.forecast.io.forecast_reader import open_forecasts, open_other_forecasts
from credit.verify.scorer import Verification, score_forecasts
from credit.verify.table.table import SHORT_WAVES, WIND_METRICS
from tests.unit.analytic_reader import AnalyticReader, make_grid
from tests.unit.verify.conftest import LEADS, MODEL_ERROR, STEP, Run, make_config, make_reader, write_forecasts


@pytest.fixture(scope="module")
def verification(run: Run) -> Verification:
    return score_forecasts(run.config, run.reader, run.archive)


def test_only_cases_with_truth_at_every_lead_are_scored(verification: Verification) -> None:
    assert verification.table.n_cases == 3 and verification.num_left_out == 1
    assert verification.table.lead_hours == [6.0, 12.0, 24.0]  # no lead 0


def test_model_scores_equal_its_constant_error(verification: Verification) -> None:
    table = verification.table
    for channel in table.channels:
        for hours in table.lead_hours:
            assert table.score("model", channel, hours) == pytest.approx(MODEL_ERROR, rel=1e-4)
            assert table.score("model", channel, hours, "bias") == pytest.approx(MODEL_ERROR, rel=1e-4)
            assert table.score("model", channel, hours, "mae", "tropics") == pytest.approx(MODEL_ERROR, rel=1e-4)


def test_baseline_scores_have_known_values(run: Run, verification: Verification) -> None:
    """Damping is fitted, so damped persistence is about as good as persistence and climatology, or better."""
    table = verification.table
    reader = run.reader
    area = reader.grid.area_weights()
    for number, lead in enumerate(LEADS):
        squares = []
        for initial in verification.cases:
            change = reader.read(reader.index_of(initial + lead))[0] - reader.read(reader.index_of(initial))[0]
            squares.append((area * change.astype(np.float64) ** 2).sum())
        assert table.scores_by_lead("persistence", "z500")[number] == pytest.approx(np.sqrt(np.mean(squares)), rel=1e-6)
    for name in ("persistence", "climatology"):
        assert (table.scores_by_lead("damped_persistence", "t2m") <= table.scores_by_lead(name, "t2m") * 1.02).all()
    # The waves average out over a year, so the RMSE of the climatology is that of the waves.
    assert table.scores_by_lead("climatology", "t2m") == pytest.approx(5 * np.sqrt(2 / 3), rel=0.02)


def test_damping_is_the_autocorrelation_of_the_waves(verification: Verification) -> None:
    days = np.array(LEADS) / 1440
    expected = (np.cos(0.9 * days) + np.cos(1.7 * days)) / 2
    np.testing.assert_allclose(verification.damping[:, 0], expected, atol=0.01)


def test_correlations(verification: Verification) -> None:
    table = verification.table
    assert np.isnan(table.scores_by_lead("climatology", "z500", "acc")).all()
    assert np.isnan(table.scores_by_lead("climatology", "z500", "acc_wb2")).all()
    # The error is uncorrelated with the anomaly, whose mean square is 50/3.
    expected = np.sqrt(50 / 3 / (50 / 3 + MODEL_ERROR**2))
    assert table.scores_by_lead("model", "z500", "acc") == pytest.approx(expected, abs=0.01)
    # Multiplication with a damping factor changes no correlation.
    np.testing.assert_allclose(
        table.scores_by_lead("damped_persistence", "z500", "acc"),
        table.scores_by_lead("persistence", "z500", "acc"),
        atol=2e-3,
    )


def test_the_wind_vector(verification: Verification) -> None:
    wind = verification.table.dataset[WIND_METRICS["rmse"]].sel(forecast="model", region="global")
    assert verification.table.dataset["wind_variable"].values.tolist() == ["wind"]
    np.testing.assert_allclose(wind[0], np.sqrt(2) * MODEL_ERROR, rtol=1e-4)


def test_maps_and_spectra_are_those_of_the_truth_and_the_forecast(run: Run, verification: Verification) -> None:
    assert verification.figure_channels == ["z500", "t2m", "tp"] and verification.figure_leads == [360, 1440]
    truth, forecast = verification.maps["z500", 1440]
    np.testing.assert_array_equal(truth, run.reader.read(run.reader.index_of(verification.example_time + 1440))[0])
    np.testing.assert_allclose(forecast - truth, MODEL_ERROR, rtol=1e-4)
    power = verification.spectra["t2m", 360]
    np.testing.assert_allclose(power[0][1:], power[1][1:], rtol=1e-3, atol=1e-6)  # A constant offset has wavenumber 0.


def test_missing_figure_leads_are_a_warning(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lead_cases = {(("240h", "12h"), (720,)), (("240h",), (1440,))}
    for leads, expected in lead_cases:
        caplog.clear()
        verification = score_forecasts(make_config(tmp_path, figure_leads=list(leads)), run.reader, run.archive)
        assert verification.figure_leads == list(expected)
        message = "verification.figure_leads: 240h: not among the forecasts, which have 6 h to 24 h; figures are of"
        assert f"{message} {expected[0] / 60:g} h" in caplog.text


def test_spectra_on_a_finer_grid_end_at_the_last_wavenumber_of_the_data(run: Run, tmp_path: Path) -> None:
    config = make_config(tmp_path, grid={"rows": 24, "columns": 48, "poles": False})
    verification = score_forecasts(config, run.reader, run.archive)
    # The last wavenumber is a third of the 24 columns of the data.
    assert verification.grid.shape == (24, 48) and verification.spectra["t2m", 360][0].shape == (9,)


def test_spectra_of_every_forecast_are_in_the_table(run: Run, tmp_path: Path) -> None:
    reader = run.reader
    start = "2001-03-04T06:00"
    colatitude = np.deg2rad(90.0 - reader.grid.lat)[:, None]
    lon = np.deg2rad(reader.grid.lon)
    # A harmonic with a mean square of 1, of an order that the truth does not contain.
    wave = np.sqrt(8 * np.pi) * special.sph_harm_y(8, 4, colatitude, lon).real
    write_forecasts(tmp_path / "other", reader, [start], wave, variables=["t2m"])
    config = make_config(tmp_path, other_forecasts={"other": str(tmp_path / "other")})
    table = score_forecasts(config, reader, run.archive).table
    assert table.dataset["power"].dims == ("forecast", "spectrum_channel", "spectrum_lead", "wavenumber")
    spectra = table.dataset.sel(spectrum_channel="t2m", spectrum_lead=24.0)
    truth, model, other = spectra["power_truth"], *(spectra["power"].sel(forecast=name) for name in ("model", "other"))
    assert truth["wavenumber"].values.tolist() == list(range(9))
    np.testing.assert_allclose(model[1:], truth[1:], rtol=1e-3, atol=1e-6)  # A constant offset has wavenumber 0.
    np.testing.assert_allclose(other, truth + np.eye(9)[8], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(spectra["power_ratio"].sel(forecast="other"), other / truth)
    short_wave_ratio = 1 + 1 / float(truth[7] + truth[8])  # The shortest third of 8 wavenumbers is 7 and 8.
    assert table.score("other", "t2m", 24, SHORT_WAVES) == pytest.approx(short_wave_ratio, rel=1e-4)
    assert table.score("model", "t2m", 24, SHORT_WAVES) == pytest.approx(1.0, rel=1e-3)
    assert np.isnan(table.score("model", "t2m", 12, SHORT_WAVES)), "no lead time of the figures"
    for forecast, channel in (("other", "z500"), ("climatology", "t2m")):
        assert np.isnan(table.dataset["power"].sel(forecast=forecast, spectrum_channel=channel)).all()
        assert np.isnan(table.score(forecast, channel, 24, SHORT_WAVES))


def test_level_dimensions_may_have_other_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    grid = make_grid(12, 24)
    start = np.array(["2001-03-04T06:00"], dtype="datetime64[ns]")
    leads = ("prediction_timedelta", [6, 12], {"units": "hours"})
    coords = {"time": start, "prediction_timedelta": leads, "latitude": grid.lat, "longitude": grid.lon}
    dims_without_level = tuple(coords)
    values = np.zeros((1, 2, 12, 24), dtype=np.float32)
    for dim in ("level", "pressure_level", "isobaricInhPa", "height"):
        variables = {"t2m": (dims_without_level, values), "z": ((dim, *dims_without_level), values[None])}
        xr.Dataset(variables, coords | {dim: [500]}).to_zarr(tmp_path / f"{dim}.zarr", consolidated=False)
        caplog.clear()
        other = OtherForecastsConfig(path=str(tmp_path / f"{dim}.zarr"))
        expected_names = ["t2m"] if dim == "height" else ["t2m", "z500"]
        assert sorted(open_other_forecasts("other", other, "hPa").channel_names) == expected_names
        assert ("height is not a level: " in caplog.text and "it is skipped" in caplog.text) == (dim == "height")
    renamed = other.model_copy(update={"rename": {"geopotential": "z"}})
    with pytest.raises(DataError, match="z has the dimensions height, time, "):
        open_other_forecasts("other", renamed, "hPa")


def test_every_time_is_read_once(run: Run) -> None:
    reader = make_reader()
    read_indices: list[int] = []
    original_read = reader.read
    # `append` returns None, so the new function returns the fields.
    reader.read = lambda index: read_indices.append(index) or original_read(index)
    score_forecasts(run.config, reader, run.archive)
    assert len(read_indices) == len(set(read_indices)) == reader.reads > 0


def test_forecast_variables_without_truth_are_named(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Examples are derived variables and levels to which forecasts were interpolated."""
    for path in (run.folder / "forecasts").glob("*.nc"):
        with xr.open_dataset(path) as dataset:
            dataset.assign(gust=dataset["t2m"]).to_netcdf(tmp_path / path.name)
    with caplog.at_level("INFO"):
        score_forecasts(run.config, run.reader, run.archive)
        assert "not scored" not in caplog.text
        score_forecasts(run.config, run.reader, open_forecasts(tmp_path))
    assert "not scored, because they are not predicted variables of data.variables: gust" in caplog.text


def test_missing_requested_scores_are_reported(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The config requests lead times without forecasts, forecasts without truth, and times beyond the data."""
    raw = run.config.model_dump(mode="json")
    raw["inference"] = {"lead_time": "24h", "lead_times": ["6h", "24h"]}
    complete = score_forecasts(build_config(raw), run.reader, run.archive).table
    assert not any("lead time" in words for words in complete.warnings())
    assert "requests" not in caplog.text and "cover" not in caplog.text
    raw["data"]["splits"]["test"] = ["2001-03-01", "2001-03-20"]
    raw["inference"] = {"lead_time": "36h"}
    caplog.clear()
    table = score_forecasts(build_config(raw), run.reader, run.archive).table
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    lead_text = (
        "3 of 6 lead times that inference requests (lead_time, output_every, lead_times) are not in the forecasts and "
        "have no scores: 18, 30, 36 h"
    )
    assert lead_text in warnings and f"{lead_text}." in table.warnings() and f"{lead_text}." in format_summary(table)
    assert (
        "data.splits.test 2001-03-01T00:00..2001-03-20T23:59: the data cover 2001-03-01T00:00 to 2001-03-10T18:00 of "
        "this period" in warnings
    )
    archive = write_forecasts(tmp_path / "late", run.reader, ["2001-03-05", "2001-03-10"])
    caplog.clear()
    assert len(score_forecasts(run.config, run.reader, archive).cases) == 1
    assert (
        f"{archive.origin}: 1 of its initial times (2, 2001-03-05T00:00 to 2001-03-10T00:00) have no scores: the data "
        "have no truth in data.splits.test 2001-03-01T00:00..2001-03-10T23:59 at every lead time up to 24 h"
    ) in caplog.text


def test_other_forecasts_share_the_cases(run: Run, tmp_path: Path) -> None:
    write_forecasts(tmp_path / "other", run.reader, ["2001-03-04T06:00"], 1.0, [720, 1440], format="zarr",
                    variables=["z", "t2m"])  # fmt: skip
    region_config = {"regions": ["arctic", "global"], "boxes": {"strip": {"lat": [0, 30], "lon": [350, 20]}}}
    config = make_config(tmp_path, other_forecasts={"other": str(tmp_path / "other")}, **region_config)
    table = score_forecasts(config, run.reader, run.archive).table
    assert table.n_cases == 1 and table.lead_hours == [12.0, 24.0]
    assert table.score("other", "t2m", 24) == pytest.approx(1.0, rel=1e-4)
    assert table.score("model", "t2m", 24) == pytest.approx(MODEL_ERROR, rel=1e-4)
    assert np.isnan(table.score("other", "u500", 24))
    assert table.regions == ["arctic", "global", "strip"]
    assert table.score("other", "t2m", 24, "bias", "strip") == pytest.approx(1.0, rel=1e-4)
    assert table.dataset["reference"].values.tolist() == ["best_baseline", "other"]
    assert table.comparison("rmse_difference", "t2m", "other") == pytest.approx(MODEL_ERROR - 1, rel=1e-3)
    assert np.isnan(table.comparison("rmse_difference", "u500", "other")).all()
    assert np.isnan(table.dataset["wind_rmse_difference"].sel(reference="other")).all()


_LONG_NAMES = {"z": "geopotential", "u": "u_component_of_wind", "v": "v_component_of_wind", "t2m": "2m_temperature"}


def _write_weatherbench2_store(folder: Path, path: Path) -> None:
    """Write netCDF forecasts in the layout of WeatherBench 2: zarr version 2 with long names."""
    datasets = [xr.open_dataset(file) for file in sorted(folder.glob("*.nc"))]
    dims = ("time", "prediction_timedelta", "level", "longitude", "latitude")
    fields = {}
    for name, long_name in _LONG_NAMES.items():
        values = np.stack([dataset[name].values for dataset in datasets])
        dims_of_field = dims if values.ndim == 5 else (*dims[:2], *dims[3:])
        fields[long_name] = (
            dims_of_field,
            np.ascontiguousarray(values.swapaxes(-1, -2)[..., ::-1]),
            datasets[0][name].attrs,
        )
    hours = datasets[0]["forecast_period"].values
    dataset = xr.Dataset(
        fields,
        {
            "time": [dataset["forecast_reference_time"].values for dataset in datasets],
            "prediction_timedelta": (hours * 3600e9).astype("timedelta64[ns]"),
            "level": datasets[0]["level"].values.astype(np.int64),
            "longitude": datasets[0]["longitude"].values,
            "latitude": datasets[0]["latitude"].values[::-1],
        },
    )
    dataset.to_zarr(path, zarr_format=2, consolidated=True)


def test_weatherbench2_store_has_the_scores_of_the_same_netcdf_forecasts(run: Run, tmp_path: Path) -> None:
    initial = ["2001-03-02T00:00", "2001-03-04T06:00", "2001-03-07T12:00"]
    write_forecasts(tmp_path / "ours", run.reader, initial, 1.0)
    _write_weatherbench2_store(tmp_path / "ours", tmp_path / "theirs.zarr")
    store = str(tmp_path / "theirs.zarr")
    others = {"ours": str(tmp_path / "ours"), "theirs": {"path": store, "rename": _LONG_NAMES}}
    config = make_config(tmp_path, other_forecasts=others)
    scores = score_forecasts(config, run.reader, run.archive).table.dataset
    scores = scores.drop_sel(channel="tp", spectrum_channel="tp", errors="ignore")
    num_compared = 0
    for name, variable in scores.data_vars.items():
        for dim in {"forecast", "reference"} & set(variable.dims):
            our_values, their_values = (
                variable.sel({dim: name_of_forecast}).values for name_of_forecast in ("ours", "theirs")
            )
            np.testing.assert_array_equal(our_values, their_values, err_msg=name)
            num_compared += int(np.isfinite(our_values).sum()) if our_values.dtype.kind in "fiu" else 0
    assert num_compared > 1000
    with pytest.raises(DataError, match=r"theirs.zarr: has none of the outputs .*z500.*geopotential500.*NAME.rename"):
        score_forecasts(make_config(tmp_path, other_forecasts={"x": store}), run.reader, run.archive)


def test_a_level_and_a_surface_variable_of_one_name_are_not_compared(run: Run, tmp_path: Path) -> None:
    """For example, u10 can be u at 10 hPa or the wind at a height of 10 m."""
    write_forecasts(tmp_path / "other", run.reader, ["2001-03-04T06:00"])
    with xr.open_dataset(next((tmp_path / "other").glob("*.nc")), decode_times=False) as dataset:
        surface_dataset = dataset.load().isel(level=0, drop=True).rename({"z": "z500"})
    (tmp_path / "flat").mkdir()
    surface_dataset.to_netcdf(tmp_path / "flat" / "forecast_2001-03-04T06.nc")
    config = make_config(tmp_path, other_forecasts={"flat": str(tmp_path / "flat")})
    with pytest.raises(DataError, match="flat: z500 is a variable without levels there and z on a level in the data"):
        score_forecasts(config, run.reader, run.archive)


def test_a_masked_output_is_scored_over_its_valid_cells(tmp_path: Path) -> None:
    reader = make_reader(every=1440)
    variables = {"prognostic": {"vars_3D": [], "vars_2D": ["sst"]}}
    channels = type(reader.channels).build(variables, [], masked_variables=["sst"])
    masked = AnalyticReader(channels, reader.grid, reader.calendar, reader.times, reader._function, reader.masks)
    archive = write_forecasts(tmp_path / "forecasts", masked, ["2001-03-02"], leads=[1440])
    raw = make_config(tmp_path).model_dump()
    raw["data"]["variables"] = variables
    raw["data"]["timestep"] = "24h"
    raw["verification"]["figure_leads"] = ["24h"]
    verification = score_forecasts(build_config(raw), masked, archive)
    assert verification.table.score("model", "sst", 24) == pytest.approx(MODEL_ERROR, rel=1e-4)
    assert not verification.spectra and np.isnan(verification.maps["sst", 1440][0]).sum() == 4


def convert_units(folder: Path, **units_by_name: tuple[str, float, float]) -> OtherForecastsConfig:
    """Convert the variables in all files of a forecast: variable -> units, scale and offset."""
    for path in folder.glob("*.nc"):
        with netCDF4.Dataset(path, "a") as file:
            for name, (units, scale, offset) in units_by_name.items():
                file[name].units = units
                file[name][:] = file[name][:] * scale + offset
    return OtherForecastsConfig(path=str(folder))


def test_other_forecasts_may_have_other_units(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores equal those of the same forecasts in the units of the data, also with some channels missing."""
    for name in ("same", "other"):
        options = {"variables": ["u", "v", "t2m"]}
        write_forecasts(tmp_path / name, run.reader, ["2001-03-04T06:00", "2001-03-07T12:00"], 1.5, **options)
    others = {
        "same": {"path": str(tmp_path / "same")},
        "other": convert_units(tmp_path / "other", t2m=("degF", 1.8, -459.67), u=("knot", 1.94384, 0.0)).model_dump(),
    }
    config = make_config(tmp_path, other_forecasts=others)
    verification = score_forecasts(config, run.reader, run.archive)
    for channel in ("t2m", "u500", "v500"):
        assert verification.table.score("same", channel, 24) == pytest.approx(1.5, rel=1e-4)
        for metric in ("rmse", "bias", "acc"):
            same, other = (verification.table.scores_by_lead(name, channel, metric) for name in ("same", "other"))
            np.testing.assert_allclose(other, same, rtol=1e-3)
    power = verification.table.dataset["power"].sel(spectrum_channel="t2m", spectrum_lead=24)
    np.testing.assert_allclose(power.sel(forecast="other"), power.sel(forecast="same"), rtol=1e-3, atol=1e-6)
    monkeypatch.setitem(sys.modules, "cf_units", None)
    missing = r'2 problems(.|\n)*other_forecasts.other: .*u is in "knot", not "m s-1"(.|\n)*\[units\]'
    with pytest.raises(DataError, match=missing):
        score_forecasts(config, run.reader, run.archive)


def test_all_mismatches_are_reported_before_fields_are_read(run: Run, tmp_path: Path) -> None:
    """One message has the problems of two forecasts and the missing common lead time."""
    reader = make_reader()
    times = ["2001-03-04T06:00", "2001-03-07T12:00"]
    for name, leads, variables in (("early", [360], ["z", "t2m"]), ("late", [720], ["u"])):
        write_forecasts(tmp_path / name, run.reader, times, 1.0, leads, variables=variables)
    write_forecasts(tmp_path / "winds", run.reader, times, 1.0, [360], variables=["z"])
    early = convert_units(tmp_path / "early", t2m=("Pa", 1.0, 0.0)).model_dump()
    config = make_config(tmp_path, other_forecasts={"early": early, "late": str(tmp_path / "late")})
    with pytest.raises(DataError) as caught:
        score_forecasts(config, reader, open_forecasts(tmp_path / "winds"))
    message = str(caught.value)
    assert message.startswith("3 problems") and reader.reads == 0
    assert f'other_forecasts.early: {tmp_path}/early: t2m is in "Pa" and cannot be converted' in message
    assert f"other_forecasts.late: {tmp_path}/late: has none of the channels that the run writes (z500)" in message
    assert "there is no lead time in common" in message and f"{tmp_path}/late has 12 h" in message
    config_of_missing_files = make_config(tmp_path, other_forecasts={"a": "/nowhere/a", "b": "/nowhere/b"})
    with pytest.raises(DataError, match=r"2 problems(.|\n)*/nowhere/a: does not exist(.|\n)*/nowhere/b: does not"):
        score_forecasts(config_of_missing_files, reader, run.archive)
    with pytest.raises(ConfigError, match="verification.animate"):
        score_forecasts(make_config(tmp_path, animate=["z50"]), reader, run.archive)
    assert reader.reads == 0


def test_the_first_message_states_the_scored_cases(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_forecasts(tmp_path / "other", run.reader, ["2001-03-04T06:00"], 1.0, [720, 1440], variables=["z", "t2m"])
    with caplog.at_level(logging.INFO):
        score_forecasts(make_config(tmp_path, other_forecasts={"b": str(tmp_path / "other")}), run.reader, run.archive)
    message = (
        "b: 1 of the model's 4 initial times and 2 of its 3 lead times are scored, because all forecasts have them; it "
        "does not have u500, v500, tp, so these have no scores"
    )
    assert caplog.messages[0] == message


def test_mismatched_grids_times_and_units_are_refused(run: Run, tmp_path: Path) -> None:
    other = AnalyticReader(
        run.reader.channels, make_grid(10, 24), run.reader.calendar, run.reader.times, lambda *_: np.zeros(1)
    )
    with pytest.raises(DataError, match="its grid is not the grid of the data: .*(12 x 24|10 x 24)"):
        score_forecasts(run.config, other, run.archive)
    archive_without_truth = write_forecasts(tmp_path / "late", run.reader, ["2001-02-03"])
    with pytest.raises(DataError, match="of 1 initial times that all forecasts have, none has truth"):
        score_forecasts(run.config, run.reader, archive_without_truth)
    run.reader.attributes["t2m"] = {"units": "Pa"}
    try:
        with pytest.raises(
            DataError, match='t2m is in "K" and cannot be converted to "Pa" .the units of t2m in the data.'
        ):
            score_forecasts(run.config, run.reader, run.archive)
    finally:
        run.reader.attributes["t2m"] = make_reader(STEP).attributes["t2m"]
    config = make_config(tmp_path, figure_channels=["z50"])
    with pytest.raises(ConfigError, match='"z50" is not scored; did you mean "z500"'):
        score_forecasts(config, run.reader, run.archive)
    with pytest.raises(ConfigError, match="file and path must be set together"):
        make_config(tmp_path, climatology={"method": "file"})
