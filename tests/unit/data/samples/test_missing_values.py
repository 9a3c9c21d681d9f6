"""Tests of missing values in source files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from credit.data.sources.source_reader import open_sources
from credit.errors import DataError
from tests.unit.data.files_on_the_fly import make_config, random_fields, write_file

H, W = 8, 16
DECLARED = {"variable_options": {"sst": {"missing": "fill_mean"}}}


def remove_land(fields: np.ndarray) -> np.ndarray:
    """Return a copy with a block of missing cells."""
    fields_with_gap = fields.copy()
    fields_with_gap[..., 2:4, 5:9] = np.nan
    return fields_with_gap


def test_missing_values_in_an_undeclared_variable_are_located(tmp_path: Path) -> None:
    t = random_fields(4, 2, H, W)
    t[2, 1, 3, 4:6] = np.nan
    reader = open_sources(
        make_config(write_file(tmp_path / "a.nc", {"t": t}, levels=[500, 850]), p3=["t"], levels=[850, 500])
    )
    reader.read(1)
    with pytest.raises(DataError) as error_info:
        reader.read(2)
    text = str(error_info.value)
    # Rows are 22.5 degrees apart and start at 78.75 north. Columns are 22.5 degrees apart and start at 0.
    for part in (
        "t, level 850",
        "2000-01-01T12:00",
        "2 of 128",
        "latitude 11.25, longitude 90",
        "variable_options.t.missing",
    ):
        assert part in text


@pytest.mark.parametrize("declared", [False, True])
def test_infinite_values_are_never_allowed(tmp_path: Path, declared: bool) -> None:
    sst = random_fields(4, H, W)
    sst[1, 0, 0] = np.inf
    path = write_file(tmp_path / "a.nc", {"sst": sst})
    reader = open_sources(make_config(path, p2=["sst"], **(DECLARED if declared else {})))
    with pytest.raises(DataError, match="sst at 2000-01-01T06:00: 1 of 128 values are infinite.*latitude 78.75"):
        reader.read(1)


@pytest.mark.parametrize("declared", [False, True])
def test_infinite_values_are_not_counted_as_missing(tmp_path: Path, declared: bool) -> None:
    """One cell of land and one of sea are infinite. The first missing cell is north of them."""
    sst = remove_land(random_fields(4, H, W))
    sst[1, 3, 5] = np.inf
    sst[1, 6, 0] = -np.inf
    path = write_file(tmp_path / "a.nc", {"sst": sst})
    reader = open_sources(make_config(path, p2=["sst"], **DECLARED))
    if not declared:
        reader = open_sources(make_config(path, p2=["sst"]))
    reason = "sst at 2000-01-01T06:00: 2 of 128 values are infinite, the first at latitude 11.25, longitude 112.5; cor"
    with pytest.raises(DataError, match=reason):
        reader.read(1)


@pytest.mark.parametrize("declared", [False, True])
def test_a_field_without_any_value_cannot_be_filled(tmp_path: Path, declared: bool) -> None:
    sst = random_fields(4, H, W)
    sst[1] = np.nan
    reader = open_sources(
        make_config(write_file(tmp_path / "a.nc", {"sst": sst}), p2=["sst"], **(DECLARED if declared else {}))
    )
    with pytest.raises(
        DataError, match=r"sst at 2000-01-01T06:00: the whole field is missing .*on_bad_time"
    ) as error_info:
        reader.read(1)
    assert "fill" not in str(error_info.value)


def test_fill_values_are_missing_values(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.nc", {"sst": remove_land(random_fields(4, H, W))}, packed={"sst": 0.01})
    reader = open_sources(make_config(path, p2=["sst"], **DECLARED))
    assert np.isnan(reader.read(0)[0, 2:4, 5:9]).all()
    reader_without_mask = open_sources(make_config(path, p2=["sst"]))
    with pytest.raises(DataError, match="8 of 128 values are missing"):
        reader_without_mask.read(0)


def test_declared_mask_is_read(tmp_path: Path) -> None:
    sst = remove_land(random_fields(4, H, W))
    t2m = random_fields(4, H, W)
    path = write_file(tmp_path / "a.nc", {"sst": sst, "t2m": t2m})
    reader = open_sources(make_config(path, p2=["t2m", "sst"], **DECLARED))
    assert list(reader.masks) == ["sst"]
    np.testing.assert_array_equal(reader.masks["sst"], np.isnan(sst[0]))
    np.testing.assert_array_equal(reader.read(3), np.stack([t2m[3], sst[3]]))


def test_a_mask_that_changes_in_time_is_refused(tmp_path: Path) -> None:
    sst = remove_land(random_fields(4, H, W))
    sst[2, 4, 5:8] = np.nan
    reader = open_sources(make_config(write_file(tmp_path / "a.nc", {"sst": sst}), p2=["sst"], **DECLARED))
    reader.read(1)
    with pytest.raises(
        DataError, match="sst at 2000-01-01T12:00: 11 cells are missing, 8 in the first field, 3 differ"
    ):
        reader.read(2)
    sst[2] = 280
    reader = open_sources(make_config(write_file(tmp_path / "b.nc", {"sst": sst}), p2=["sst"], **DECLARED))
    with pytest.raises(DataError, match="0 cells are missing, 8 in the first field, 8 differ"):
        reader.read(2)


def test_levels_with_different_masks_are_refused(tmp_path: Path) -> None:
    sst = random_fields(4, 2, H, W)
    sst[:, 1, 0, 0] = np.nan
    path = write_file(tmp_path / "a.nc", {"sst": sst}, levels=[500, 850])
    with pytest.raises(DataError, match="sst: 1 cells are missing at level 850, 0 at another"):
        open_sources(make_config(path, p3=["sst"], levels=[500, 850], **DECLARED))


def test_missing_values_in_a_static_field_must_be_declared(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.nc", {"t2m": random_fields(4, H, W), "ground": remove_land(random_fields(H, W))})
    with pytest.raises(DataError, match="ground at any time: 8 of 128 values are missing"):
        open_sources(make_config(path, p2=["t2m"], static=["ground"]))
    declared = {"variable_options": {"ground": {"missing": "fill_mean"}}}
    reader = open_sources(make_config(path, p2=["t2m"], static=["ground"], **declared))
    assert reader.masks["ground"].sum() == 8


def test_first_field_without_any_value_is_refused(tmp_path: Path) -> None:
    sst = random_fields(4, H, W)
    sst[0] = np.nan
    with pytest.raises(DataError, match="sst: all values of the first field"):
        open_sources(make_config(write_file(tmp_path / "a.nc", {"sst": sst}), p2=["sst"], **DECLARED))
