"""Tests of `verification.all_pairs`, the comparison of each pair of forecasts."""

from __future__ import annotations

from pathlib import Path

import pytest
import xarray as xr

from credit.errors import ConfigError, DataError
from credit.verify.verification import verify_forecasts
from tests.unit.verify.conftest import Run, make_config, write_forecasts

INITIAL_TIMES = ["2001-03-02T00:00", "2001-03-04T06:00", "2001-03-07T12:00"]
# Attributes that differ because the verifications have different names.
NAMES = ("title", "experiment")


def test_tables_of_pairs_equal_separate_verifications(run: Run, tmp_path: Path) -> None:
    archives = {}
    for name, error in {"b": 1.0, "c": 2.5, "d": 0.5}.items():
        archives[name] = write_forecasts(tmp_path / name, run.reader, INITIAL_TIMES, error)
    paths = {name: str(tmp_path / name) for name in archives}
    config = make_config(tmp_path / "run", other_forecasts=paths, all_pairs=True, draw_figures=False)
    verify_forecasts(config, run.reader, run.archive, tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run" / "pairs").iterdir()) == ["b", "c", "d"]

    for position, name in enumerate(archives):
        later_forecasts = {other: paths[other] for other in list(archives)[position + 1 :]}
        config = make_config(tmp_path / "run", other_forecasts=later_forecasts, draw_figures=False)
        table = verify_forecasts(config, run.reader, archives[name], tmp_path / f"of_{name}")
        with xr.open_dataset(tmp_path / "run" / "pairs" / name / "scores.nc") as dataset:
            assert dataset["reference"].values.tolist() == ["best_baseline", *later_forecasts]
            expected = table.dataset.assign_attrs({key: dataset.attrs[key] for key in NAMES})
            xr.testing.assert_allclose(dataset.drop_attrs(deep=True), expected.drop_attrs(deep=True), rtol=1e-6)
            assert dataset.attrs["experiment"] == name
            assert dataset.attrs["first_case"] == expected.attrs["first_case"]

    # Tables of an earlier verification are removed.
    verify_forecasts(config, run.reader, run.archive, tmp_path / "run")
    assert not list((tmp_path / "run" / "pairs").glob("*/*"))


def test_a_forecast_without_a_channel_is_refused(run: Run, tmp_path: Path) -> None:
    write_forecasts(tmp_path / "b", run.reader, INITIAL_TIMES, format="zarr", variables=["z", "t2m"])
    config = make_config(tmp_path / "run", other_forecasts={"b": str(tmp_path / "b")}, all_pairs=True)
    with pytest.raises(DataError, match=r"verification.all_pairs: the forecasts b lack .*u500"):
        verify_forecasts(config, run.reader, run.archive, tmp_path / "run")


def test_a_name_that_cannot_be_a_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match="names a folder with all_pairs"):
        make_config(Path("run"), other_forecasts={"a/b": "x"}, all_pairs=True)
