"""Zarr stores that several ranks write together; each rank writes its part of the fields."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr

from credit.calendar import Calendar
from credit.errors import ConfigError
from credit.forecast.store_part import StorePart
from credit.parallel.domain.division import AxisDivision, FieldDivision, divide_field
from tests.unit.forecast.test_forecast_writer import INITIAL, make_writer, random_fields

FIRST, SECOND = (Calendar().parse(text) for text in INITIAL)
STORE = "forecasts.zarr"


def build_axis(*sizes: int) -> AxisDivision:
    """Return a division of an axis into parts of these sizes."""
    bounds = np.cumsum([0, *sizes]).tolist()
    parts = tuple(range(start, end) for start, end in zip(bounds[:-1], bounds[1:], strict=True))
    return AxisDivision(bounds[-1], parts, parts)


# 6 rows x 12 columns: two equal parts of the rows, and parts of 2, 6 and 4 columns.
DIVISION = FieldDivision(build_axis(3, 3), build_axis(2, 6, 4))


def write_parts(folder: Path, division: FieldDivision, initial_minutes: int, fields_NCHW: np.ndarray) -> None:
    """Write a forecast as the ranks of a domain group do, one after another."""
    times = [initial_minutes]
    parts = [StorePart(division, rank) for rank in range(division.num_ranks)]
    writers = [make_writer(folder, format="zarr", initial_minutes=times, part=part) for part in parts]
    for part, writer in zip(parts, writers, strict=True):
        for lead_index, fields_CHW in enumerate(fields_NCHW):
            writer.put(initial_minutes, lead_index, fields_CHW[(..., *part.part.slices)])
        assert not writer.is_complete(initial_minutes)
    writers[0].mark_complete(initial_minutes)


def open_store(folder: Path) -> xr.Dataset:
    """Return the contents of a store."""
    return xr.open_dataset(folder / STORE, engine="zarr").load()


def test_store_written_in_parts_equals_that_of_one_process(tmp_path: Path) -> None:
    """Ranks with the same parts extend the store, and then one process does. The chunks do not change."""
    third = SECOND + 1440
    for initial_minutes, seed in ((FIRST, 0), (SECOND, 1)):
        write_parts(tmp_path / "parts", DIVISION, initial_minutes, random_fields(seed))
    make_writer(tmp_path / "parts", format="zarr", initial_minutes=[third]).write(third, random_fields(2))
    for initial_minutes, seed in ((FIRST, 0), (SECOND, 1), (third, 2)):
        writer = make_writer(tmp_path / "whole", format="zarr", initial_minutes=[initial_minutes])
        writer.write(initial_minutes, random_fields(seed))
    xr.testing.assert_identical(open_store(tmp_path / "parts"), open_store(tmp_path / "whole"))
    assert zarr.open_group(tmp_path / "parts" / STORE)["t"].chunks[-2:] == (3, 2)


def test_chunks_with_cells_of_several_ranks_are_refused(tmp_path: Path) -> None:
    make_writer(tmp_path, format="zarr", initial_minutes=[FIRST]).write(FIRST, random_fields())
    with pytest.raises(ConfigError, match="has chunks of 6 rows x 12 columns.*set domain to 1"):
        write_parts(tmp_path, DIVISION, SECOND, random_fields())


@pytest.mark.parametrize(
    ("axis", "length"),
    [(build_axis(12), 12), (build_axis(360, 361), 360), (build_axis(120, 200, 200, 120), 40)],
    ids=["one part", "one bound", "three bounds"],
)
def test_chunks_are_as_large_as_the_bounds_allow(axis: AxisDivision, length: int) -> None:
    part = StorePart(FieldDivision(axis, build_axis(8)), rank=0)
    assert part.choose_chunks() == (length, 8)
    part.require_aligned((length, 8), "store")


def test_parts_that_need_tiny_chunks_are_refused() -> None:
    part = StorePart(FieldDivision(build_axis(100, 101, 100), build_axis(8)), rank=0)
    with pytest.raises(ConfigError, match="parts of 100, 101, 100, which need chunks of 1; chunks of this size"):
        part.choose_chunks()


def test_a_rank_knows_its_chunks() -> None:
    division = divide_field((6, 12), (2, 2))
    assert StorePart(division, rank=3).find_chunks((3, 2)) == [(1, 3), (1, 4), (1, 5)]
