"""Derived fields compared with formulas, and errors about invalid inputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from credit.errors import CreditError
from credit.forecast.io.archive.base import ForecastArchive
from credit.forecast.io.forecast_reader import open_forecasts
from credit.forecast.io.schema import OutputFields, OutputOptions, build_schema
from credit.products.derived import find_sum_terms
from credit.products.description import describe_archive, describe_schema
from tests.unit.products.forecasts import (
    ATTRIBUTES,
    CALENDAR,
    CHANNELS,
    GRID,
    LEADS,
    MEMBERS,
    NAMES,
    STEP,
    compute_product,
    plan_entries,
    random_ensemble,
    write_forecasts,
)


@pytest.fixture(scope="module")
def ensemble() -> np.ndarray:
    return random_ensemble()


@pytest.fixture(scope="module")
def archive(ensemble: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> ForecastArchive:
    return write_forecasts(tmp_path_factory.mktemp("forecasts"), ensemble)


def select_channel(ensemble: np.ndarray, name: str) -> np.ndarray:
    """Return a channel (L, M, H, W) in float64."""
    return ensemble[:, :, NAMES.index(name)].astype(np.float64)


@pytest.mark.parametrize("pair", [["u10", "v10"], ["u850", "v850"]])
def test_wind_speed(archive: ForecastArchive, ensemble: np.ndarray, pair: list[str]) -> None:
    speed = compute_product(archive, "wind", {"kind": "wind_speed", "name": "wind", "of": pair})
    expected = np.sqrt(select_channel(ensemble, pair[0]) ** 2 + select_channel(ensemble, pair[1]) ** 2)
    np.testing.assert_allclose(speed, expected, rtol=1e-6)


@pytest.mark.parametrize("height", [10.0, 40.0, 100.0])
def test_wind_speed_by_the_power_law(archive: ForecastArchive, ensemble: np.ndarray, height: float) -> None:
    """The expected values follow the published formula, in which the exponent is computed first."""
    entry = {"kind": "wind_speed_at_height", "name": "wind", "height": height}
    lower = np.hypot(select_channel(ensemble, "u10"), select_channel(ensemble, "v10"))
    upper = np.hypot(select_channel(ensemble, "u100"), select_channel(ensemble, "v100"))
    exponent = np.log(upper / lower) / np.log(100.0 / 10.0)
    np.testing.assert_allclose(compute_product(archive, "wind", entry), lower * (height / 10.0) ** exponent, rtol=2e-6)


def test_wind_speed_by_the_log_law(archive: ForecastArchive, ensemble: np.ndarray) -> None:
    """The expected values follow the published formula, with slope and roughness length from both speeds."""
    entry = {"kind": "wind_speed_at_height", "name": "wind", "height": 60, "profile": "log"}
    lower = np.hypot(select_channel(ensemble, "u10"), select_channel(ensemble, "v10"))
    upper = np.hypot(select_channel(ensemble, "u100"), select_channel(ensemble, "v100"))
    slope = (upper - lower) / np.log(100.0 / 10.0)
    roughness_log = np.log(10.0) - lower / slope
    np.testing.assert_allclose(
        compute_product(archive, "wind", entry), slope * (np.log(60.0) - roughness_log), rtol=1e-5
    )


def test_thickness(archive: ForecastArchive, ensemble: np.ndarray) -> None:
    entry = {"kind": "thickness", "name": "layer", "of": ["z1000", "z500"]}
    expected = (select_channel(ensemble, "z500") - select_channel(ensemble, "z1000")) / 9.80665
    np.testing.assert_allclose(compute_product(archive, "layer", entry), expected, rtol=1e-6)
    # About 5400 m, as on weather maps.
    assert 5350 < expected.mean() < 5450


@pytest.mark.parametrize("name", ["tp", "total"])
def test_accumulations_over_hours(archive: ForecastArchive, ensemble: np.ndarray, name: str) -> None:
    """Sums over a step are added, and sums since the initial time are subtracted. Both results are equal."""
    total = compute_product(archive, "sum", {"kind": "accumulation", "name": "sum", "of": name, "over": "24h"})
    rain = select_channel(ensemble, "tp")
    assert np.isnan(total[:3]).all()
    for lead_index in range(3, len(LEADS)):
        expected = rain[lead_index - 3 : lead_index + 1].sum(axis=0)
        np.testing.assert_allclose(total[lead_index], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["tp", "total"])
def test_accumulations_since_the_start(archive: ForecastArchive, ensemble: np.ndarray, name: str) -> None:
    total = compute_product(archive, "sum", {"kind": "accumulation", "name": "sum", "of": name})
    np.testing.assert_allclose(total, select_channel(ensemble, "tp").cumsum(axis=0), rtol=1e-5)


def test_terms_of_sums() -> None:
    leads = [720, 1440]
    # Every second step of 6-hourly sums leaves gaps.
    assert find_sum_terms(leads, {720: 360, 1440: 360}, 1440, 0) is None
    assert find_sum_terms(leads, {720: 720, 1440: 720}, 1440, 0) == [(1, 1), (0, 1)]
    assert find_sum_terms(leads, {720: 720, 1440: 1440}, 1440, 720) == [(1, 1), (0, -1)]
    assert find_sum_terms(leads, {720: 720, 1440: 1440}, 1440, 360) is None
    # Some programs write bounds of length 0 for instantaneous values.
    assert find_sum_terms(leads, {720: 0, 1440: 0}, 1440, 0) is None


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"kind": "wind_speed", "of": ["u10", "v11"]}, 'products.0.of: "v11" is neither a variable'),
        ({"kind": "wind_speed", "of": ["v10", "u10"]}, "v10 is the northward component"),
        ({"kind": "wind_speed", "of": ["t2m", "v10"]}, 't2m is in "K", which is not a speed'),
        ({"kind": "wind_speed", "of": ["u850", "v500"]}, "on different levels"),
        ({"kind": "wind_speed_at_height", "height": 120}, "not between 10 and 100 m"),
        ({"kind": "wind_speed_at_height", "height": 20, "of": {10: ["u10", "v10"]}}, "the wind at two heights"),
        (
            {"kind": "wind_speed_at_height", "height": 20, "of": {10: ["u10", "v10"], 80: ["u80", "v80"]}},
            'products.0.of.80: "u80" is neither',
        ),
        ({"kind": "thickness", "of": ["z1000", "z300"]}, 'products.0.of: "z300" is neither'),
        ({"kind": "thickness", "of": ["z500", "z1000"]}, "z500 is not below z1000"),
        ({"kind": "thickness", "of": ["u1000", "u500"]}, 'u1000 is in "m s-1"'),
        ({"kind": "thickness", "of": ["msl", "z500"]}, "msl is not on a pressure level"),
        ({"kind": "accumulation", "of": "t2m", "over": "12h"}, "t2m is not a sum over the step"),
        ({"kind": "accumulation", "of": "tp", "over": "9h"}, "do not add up to the 9 h"),
        ({"kind": "accumulation", "of": "total", "over": "12h", "window": "6h"}, "the bounds of the times of total"),
        ({"kind": "wind_sped", "of": ["u10", "v10"]}, 'is not a product; did you mean "wind_speed"'),
    ],
)
def test_wrong_products_are_refused(archive: ForecastArchive, entry: dict[str, Any], message: str) -> None:
    with pytest.raises(CreditError, match=message):
        plan_entries(archive, {"name": "new", **entry})


@pytest.mark.parametrize(
    "entry",
    [{"kind": "probability", "above": 1.0}, {"kind": "quantiles"}, {"kind": "spread"}],
    ids=["probability", "quantiles", "spread"],
)
def test_statistics_of_sums_are_not_summed(archive: ForecastArchive, entry: dict[str, Any]) -> None:
    with pytest.raises(CreditError, match="products.1.of: a is a probability or another statistic"):
        plan_entries(
            archive,
            {**entry, "name": "a", "of": "tp"},
            {"kind": "accumulation", "name": "b", "of": "a", "over": "12h"},
        )


def test_winds_at_pressure_levels_are_not_winds_at_heights(archive: ForecastArchive) -> None:
    """In forecasts without the wind at 10 m, u10 is the wind at 10 hPa."""
    forecasts = describe_archive(archive)
    fields = dict(forecasts.fields)
    for name, level in {"u10": 10.0, "v10": 10.0, "u100": 100.0, "v100": 100.0}.items():
        fields[name] = replace(fields[name], level=level)
    with pytest.raises(CreditError, match="u10 is the wind at 10 hPa, not at 10 m"):
        plan_entries(
            replace(forecasts, fields=fields), {"kind": "wind_speed_at_height", "name": "wind80", "height": 80}
        )


def test_duplicate_names_are_refused(archive: ForecastArchive) -> None:
    with pytest.raises(CreditError, match='"t2m" is a variable of the forecasts'):
        plan_entries(archive, {"kind": "mean", "name": "t2m", "of": "msl"})
    with pytest.raises(CreditError, match='the name "a" is given twice'):
        plan_entries(archive, {"kind": "mean", "name": "a", "of": "msl"}, {"kind": "mean", "name": "a", "of": "t2m"})


def test_several_errors_are_reported_together(archive: ForecastArchive) -> None:
    """A product that depends on an invalid product causes no additional error."""
    with pytest.raises(CreditError) as error:
        plan_entries(
            archive,
            {"kind": "wind_speed", "name": "a", "of": ["u10", "v11"]},
            {"kind": "mean", "name": "b", "of": "a"},
            {"kind": "mean", "name": "c", "of": "t3m"},
        )
    text = str(error.value)
    assert "2 problems" in text and "v11" in text and "t3m" in text


@pytest.mark.parametrize(
    "options",
    [{}, {"split": "lead"}, {"split": "member"}, {"format": "zarr"}, {"variables": ["tp", "t2m"]}],
    ids=["one file", "leads", "members", "zarr", "one window"],
)
def test_descriptions_before_and_after_writing_are_equal(tmp_path: Path, options: dict[str, Any]) -> None:
    """`credit check` and `credit rollout` see the same fields, units, levels and windows of sums as the files have."""
    written = describe_archive(write_forecasts(tmp_path, random_ensemble(), **options))
    fields = OutputFields(CHANNELS, GRID, CALENDAR, ATTRIBUTES, STEP, windows={"tp": STEP, "total": 0})
    planned = describe_schema(build_schema(fields, LEADS, OutputOptions(**options), MEMBERS))
    assert dict(planned.fields) == dict(written.fields)
    assert written.fields["tp"].windows == dict.fromkeys(LEADS, STEP)
    assert written.fields["t2m"].windows == {} and written.fields["t2m"].temporal == "point"
    if "total" in written.fields:
        assert written.fields["total"].windows == {lead: lead for lead in LEADS}
    assert planned.members == written.members and planned.level_units == written.level_units


def test_files_without_bounds_need_a_window(
    archive: ForecastArchive, ensemble: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(archive.windows, "tp")
    entry = {"kind": "accumulation", "name": "sum", "of": "tp", "over": "12h"}
    with pytest.raises(CreditError, match="have no bounds"):
        plan_entries(archive, entry)
    total = compute_product(archive, "sum", {**entry, "window": "6h"})
    expected = select_channel(ensemble, "tp")[0:2].sum(axis=0)
    np.testing.assert_allclose(total[1], expected, rtol=1e-6)


def test_sums_of_a_store_with_the_initial_time(tmp_path: Path) -> None:
    """Stores of WeatherBench 2 have the lead time 0, and no bounds."""
    rain = np.random.default_rng(0).random((1, 4, *GRID.shape), dtype=np.float32)
    coords = {
        "time": ("time", [0], {"units": "hours since 2001-04-01"}),
        "prediction_timedelta": ("prediction_timedelta", [0, 6, 12, 18], {"units": "hours"}),
        "latitude": GRID.lat, "longitude": GRID.lon,
    }  # fmt: skip
    dims = ("time", "prediction_timedelta", "latitude", "longitude")
    dataset = xr.Dataset({"tp": (dims, rain, {"units": "mm"})}, coords)
    dataset.to_zarr(tmp_path / "store.zarr", consolidated=False)
    archive = open_forecasts(tmp_path / "store.zarr")
    entry = {"kind": "accumulation", "name": "sum", "of": "tp", "window": "6h"}
    total = compute_product(archive, "sum", entry)[:, 0]
    assert (total[0] == 0.0).all()
    np.testing.assert_allclose(total[1:], rain[0, 1:].cumsum(axis=0), rtol=1e-6)
    total = compute_product(archive, "sum", {**entry, "over": "12h"})[:, 0]
    assert np.isnan(total[:2]).all()
    np.testing.assert_allclose(total[2:], rain[0, 1:-1] + rain[0, 2:], rtol=1e-6)
