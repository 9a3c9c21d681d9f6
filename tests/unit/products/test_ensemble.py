"""Products of ensembles compared with numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from credit.errors import CreditError
from credit.forecast.io.archive.base import ForecastArchive
from credit.products.base import FieldReader
from tests.unit.products.forecasts import (
    INITIAL,
    LEADS,
    NAMES,
    compute_product,
    plan_entries,
    random_ensemble,
    write_forecasts,
)


@pytest.fixture(scope="module")
def ensemble() -> np.ndarray:
    return random_ensemble(seed=1)


@pytest.fixture(scope="module")
def archive(ensemble: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> ForecastArchive:
    return write_forecasts(tmp_path_factory.mktemp("forecasts"), ensemble)


def select_channel(ensemble: np.ndarray, name: str) -> np.ndarray:
    """Return a channel (L, M, H, W) in float64."""
    return ensemble[:, :, NAMES.index(name)].astype(np.float64)


def test_statistics_of_members(archive: ForecastArchive, ensemble: np.ndarray) -> None:
    values = select_channel(ensemble, "t2m")
    expected = {
        "mean": values.mean(axis=1),
        "spread": values.std(axis=1, ddof=1),
        "minimum": values.min(axis=1),
        "maximum": values.max(axis=1),
    }
    for kind, fields in expected.items():
        result = compute_product(archive, "new", {"kind": kind, "name": "new", "of": "t2m"})
        np.testing.assert_allclose(result[:, 0], fields, rtol=1e-6, err_msg=kind)


def test_quantiles(archive: ForecastArchive, ensemble: np.ndarray) -> None:
    shares = [0.0, 0.1, 0.5, 0.75, 1.0]
    result = compute_product(archive, "q", {"kind": "quantiles", "name": "q", "of": "msl", "quantiles": shares})
    expected = np.quantile(select_channel(ensemble, "msl"), shares, axis=1).swapaxes(0, 1)
    np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("limit", "value"),
    [
        ({"above": 288.0}, 288.0),
        ({"above": "288 K"}, 288.0),
        ({"above": "14.85 degC"}, 288.0),
        ({"below": 280}, 280.0),
        ({"at_least": "290 K"}, 290.0),
        ({"at_most": "290 K"}, 290.0),
        ({"above": "2.88e2K"}, 288.0),
    ],
)
def test_probabilities(archive: ForecastArchive, ensemble: np.ndarray, limit: dict[str, Any], value: float) -> None:
    result = compute_product(archive, "p", {"kind": "probability", "name": "p", "of": "t2m", **limit})
    values = select_channel(ensemble, "t2m")
    is_above = next(iter(limit)) in ("above", "at_least")
    happens = values > value if is_above else values < value
    np.testing.assert_allclose(result[:, 0], happens.mean(axis=1), atol=1e-7)


def test_a_value_at_the_limit(tmp_path: Path) -> None:
    """0.1 in float32 is larger than 0.1, so the limit must be rounded like the fields."""
    fields = random_ensemble()
    fields[:, :, NAMES.index("tp")] = np.float32(0.1)
    archive = write_forecasts(tmp_path, fields)
    for key, expected in {"above": 0.0, "at_least": 1.0, "below": 0.0, "at_most": 1.0}.items():
        result = compute_product(archive, "p", {"kind": "probability", "name": "p", "of": "tp", key: "0.1 mm"})
        assert (result == expected).all(), key


def test_missing_cells_stay_missing(tmp_path: Path) -> None:
    """A cell is missing if one member is missing: NaN is never above a limit, so it would lower the probability."""
    fields = random_ensemble()
    fields[:, 2, NAMES.index("t2m"), 3, 4] = np.nan
    archive = write_forecasts(tmp_path, fields)
    entries = [
        {"kind": "probability", "above": 1.0},
        {"kind": "mean"},
        {"kind": "spread"},
        {"kind": "minimum"},
        {"kind": "quantiles"},
    ]
    for entry in entries:
        result = compute_product(archive, "new", {"name": "new", "of": "t2m", **entry})
        is_missing = np.isnan(result)
        assert is_missing[:, :, 3, 4].all() and is_missing.sum() == is_missing[:, :, 3, 4].size, entry


def test_products_of_products(archive: ForecastArchive, ensemble: np.ndarray) -> None:
    """The wind speed is computed for each member, and its probability for the ensemble."""
    entries = [
        {"kind": "wind_speed", "name": "wind", "of": ["u10", "v10"], "write": False},
        {"kind": "probability", "name": "p", "of": "wind", "above": "36 km/h"},
    ]
    result = compute_product(archive, "p", *entries)
    speed = np.hypot(select_channel(ensemble, "u10"), select_channel(ensemble, "v10"))
    np.testing.assert_allclose(result[:, 0], (speed > 10.0).mean(axis=1), atol=1e-7)


def test_fields_are_read_once_for_several_products(archive: ForecastArchive, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [{"kind": kind, "name": kind, "of": "t2m"} for kind in ("mean", "spread", "minimum", "maximum")]
    products = {item.name: item for item in plan_entries(archive, *entries)}
    reads = []
    read_channel = archive.read_channel
    monkeypatch.setattr(archive, "read_channel", lambda *key: reads.append(key) or read_channel(*key))
    reader = FieldReader(archive, INITIAL, products)
    for lead_index in range(len(LEADS)):
        for name in products:
            reader.read(name, lead_index)
    assert reads == [(INITIAL, lead_index, "t2m") for lead_index in range(len(LEADS))]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"kind": "probability", "of": "t2m", "above": "15 m s-1"}, "cannot be compared with t2m"),
        ({"kind": "probability", "of": "t2m", "above": "warm"}, 'products.0.above: "warm" is not a limit'),
        ({"kind": "probability", "of": "t2m", "above": "1.2.3 K"}, '"1.2.3 K" is not a limit'),
        ({"kind": "probability", "of": "t2m", "above": float("nan")}, "above"),
        ({"kind": "probability", "of": "t2m"}, "has no limit"),
        ({"kind": "probability", "of": "t2m", "above": 1, "below": 2}, "has above and below"),
        ({"kind": "quantiles", "of": "t2m", "quantiles": [0.9, 0.1]}, "must increase"),
        ({"kind": "quantiles", "of": "t2m", "quantiles": [10, 90]}, "ninetieth percentile is 0.9"),
        ({"kind": "mean", "of": "t3m"}, 'did you mean "t2m"'),
    ],
)
def test_wrong_products_are_refused(archive: ForecastArchive, entry: dict[str, Any], message: str) -> None:
    with pytest.raises(CreditError, match=message):
        plan_entries(archive, {"name": "new", **entry})


def test_single_forecasts_have_no_probabilities(tmp_path: Path) -> None:
    archive = write_forecasts(tmp_path, random_ensemble(members=1), members=None)
    with pytest.raises(CreditError, match="t2m has no members"):
        plan_entries(archive, {"kind": "mean", "name": "new", "of": "t2m"})


def test_one_member_has_no_spread(tmp_path: Path) -> None:
    archive = write_forecasts(tmp_path, random_ensemble(members=1), members=1)
    with pytest.raises(CreditError, match="t2m has one member; a spread needs at least two"):
        plan_entries(archive, {"kind": "spread", "name": "new", "of": "t2m"})
    plan_entries(archive, {"kind": "mean", "name": "new", "of": "t2m"})


def test_statistics_of_statistics_are_refused(archive: ForecastArchive) -> None:
    entries = [{"kind": "mean", "name": "a", "of": "t2m"}, {"kind": "spread", "name": "b", "of": "a"}]
    with pytest.raises(CreditError, match="products.1.of: a has no members"):
        plan_entries(archive, *entries)
