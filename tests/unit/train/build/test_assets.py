"""Tests of model assets: the round trip through a checkpoint, and the checks of other data against them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.config import Config, build_config
from credit.data.samples.frames import FrameReader
from credit.data.splits import build_splits
from credit.errors import CheckpointError, DataError
from credit.train.build.assets import ModelAssets, fit_assets
from credit.train.build.initial_condition_checks import describe_distribution_shift, find_cells_missing_in_training
from credit.train.build.stepper import build_normalizer
from credit.train.checkpoint.trained_fields import require_same_fields
from tests.unit.analytic_reader import AnalyticReader, make_grid

RAW = {
    "save_loc": "unused",
    "data": {
        "sources": [{"path": "unused.nc"}],
        "levels": [850],
        "variables": {
            "prognostic": {"vars_3D": ["u", "t"], "vars_2D": ["t2m"]},
            "dynamic_forcing": {"vars_2D": ["sst"]},
            "static": {"vars_2D": ["sin_latitude"]},
        },
        "variable_options": {"sst": {"missing": "fill_mean"}},
        "splits": {
            "train": ["2000-01-01", "2000-12-31"],
            "valid": ["2001-01-11", "2001-01-31"],
            "test": ["2001-02-11", "2001-02-20"],
        },
    },
    "model": {"type": "wxformer"},
    "trainer": {"max_steps": 1},
}


def build_reader(config: Config) -> AnalyticReader:
    calendar, grid = Calendar(), make_grid(8, 16)
    rng = np.random.default_rng(0)
    pattern = rng.normal(size=grid.shape)
    times = calendar.parse("2000-01-01") + 360 * np.arange(1464)

    def field(minutes: int, channel: int) -> np.ndarray:
        return 7 + pattern * np.cos(2 * np.pi * minutes / 525600 + channel) + 0.3 * np.cos(minutes / 1000)

    masks = {"sst": pattern > 0.5}
    return AnalyticReader(config.data.channel_map(), grid, calendar, times, field, masks)


@pytest.fixture(scope="module")
def reader_and_assets() -> tuple[AnalyticReader, ModelAssets]:
    config = build_config(RAW)
    reader = build_reader(config)
    return reader, fit_assets(config, reader, build_splits(config.data, reader.calendar)["train"])


def test_assets_round_trip_through_a_checkpoint(reader_and_assets: tuple[AnalyticReader, ModelAssets]) -> None:
    reader, assets = reader_and_assets
    loaded = ModelAssets.from_stored(json.loads(json.dumps(assets.to_meta())), assets.to_tensors())
    assert loaded.channels == assets.channels
    assert loaded.grid.describe_mismatch(assets.grid) is None
    assert loaded.statistics.names == assets.statistics.names
    np.testing.assert_array_equal(loaded.statistics.tendency_std, assets.statistics.tendency_std)
    np.testing.assert_array_equal(loaded.static_CHW, assets.static_CHW)
    np.testing.assert_array_equal(loaded.masks["sst"], reader.masks["sst"])
    later = reader.calendar.parse("2001-05-01")
    np.testing.assert_array_equal(loaded.climatology.evaluate(later), assets.climatology.evaluate(later))
    require_same_fields(loaded, reader, Path("step"))


def test_wind_is_only_scaled(reader_and_assets: tuple[AnalyticReader, ModelAssets]) -> None:
    """Across a pole u becomes -u, which holds for normalised values only if 0 still means no wind."""
    _, assets = reader_and_assets
    assert assets.statistics.select(["u850"]).mean[0] == 0
    assert assets.statistics.select(["t850"]).mean[0] == pytest.approx(7, abs=0.5)


def test_other_data_are_refused(reader_and_assets: tuple[AnalyticReader, ModelAssets]) -> None:
    reader, assets = reader_and_assets
    fewer_channels = ChannelMap.build({"prognostic": {"vars_3D": ["u"], "vars_2D": ["t2m"]}}, [850])
    with pytest.raises(CheckpointError, match="t850"):
        require_same_fields(replace(assets, channels=fewer_channels), reader, Path("step"))
    with pytest.raises(DataError, match="16 x 32 cells against 8 x 16"):
        require_same_fields(replace(assets, grid=make_grid(16, 32)), reader, Path("step"))
    attributes_in_celsius = {**assets.attributes, "t2m": {"units": "degC"}}
    with pytest.raises(
        DataError, match='t2m: the data are in K.*trained on degC; data.variable_options.t2m.units: "degC"'
    ):
        require_same_fields(replace(assets, attributes=attributes_in_celsius), reader, Path("step"))
    attributes_in_metres = {**assets.attributes, "t2m": {"units": "m"}}
    with pytest.raises(DataError, match="trained on m; these units measure different quantities: correct the units"):
        require_same_fields(replace(assets, attributes=attributes_in_metres), reader, Path("step"))


def test_cells_missing_in_training_are_hidden(reader_and_assets: tuple[AnalyticReader, ModelAssets]) -> None:
    """Cells that were missing in training are hidden; cells with values in training must have values."""
    reader, assets = reader_and_assets
    sst_mask_HW = assets.masks["sst"]
    assert find_cells_missing_in_training(assets, reader, Path("step")) == {}
    message = f"sst: the data are missing in {sst_mask_HW.sum()} cells where the checkpoint"
    for masks in ({}, {"sst": ~sst_mask_HW}):
        with pytest.raises(DataError, match=message):
            find_cells_missing_in_training(replace(assets, masks=masks), reader, Path("step"))
    trained_masks = {"sst": sst_mask_HW | np.roll(sst_mask_HW, 1, axis=1), "t2m": ~sst_mask_HW}
    hidden_cells = find_cells_missing_in_training(replace(assets, masks=trained_masks), reader, Path("step"))
    frames = FrameReader(reader, build_config(RAW).data, None, hidden_cells)
    state_CHW = frames.state(int(reader.times[0]))
    stored_CHW = reader.read(0)
    names = [channel.name for channel in reader.channels.time_varying_stored]
    for channel_index, field_HW in enumerate(state_CHW):
        mask_HW = trained_masks.get(names[channel_index], False)
        np.testing.assert_array_equal(field_HW, np.where(mask_HW, np.nan, stored_CHW[channel_index]))


def test_masks_of_diagnostic_and_static_variables_are_ignored(
    reader_and_assets: tuple[AnalyticReader, ModelAssets],
) -> None:
    _, assets = reader_and_assets
    raw = json.loads(json.dumps(RAW))
    raw["data"]["variables"] |= {"diagnostic": {"vars_2D": ["tp"]}, "static": {"vars_2D": ["lsm"]}}
    reader = build_reader(build_config(raw))
    reader.masks |= {"tp": reader.masks["sst"], "lsm": reader.masks["sst"]}
    assets = replace(assets, channels=reader.channels)
    assert find_cells_missing_in_training(assets, reader, Path("step")) == {}
    everywhere = {name: np.ones_like(mask_HW) for name, mask_HW in reader.masks.items()}
    assert find_cells_missing_in_training(replace(assets, masks=everywhere), reader, Path("step")).keys() == {"sst"}


def test_a_distribution_shift_names_the_channels(reader_and_assets: tuple[AnalyticReader, ModelAssets]) -> None:
    reader, assets = reader_and_assets
    normalizer = build_normalizer(build_config(RAW), assets)
    names = [channel.name for channel in assets.channels.group("prognostic")]
    fields_CHW = reader.read(0)[: len(names)].copy()
    # The wind of the test data has a mean of 7, but its statistics have the mean 0.
    fields_CHW[names.index("u850")] -= 7
    assert describe_distribution_shift(assets, normalizer, fields_CHW, "now") == ""
    fields_CHW[names.index("t2m")] -= 7 * assets.statistics.select(["t2m"]).std[0]
    warning = describe_distribution_shift(assets, normalizer, fields_CHW, "now")
    assert re.search(r"of now differ.* deviations: t2m -[678]\S*;", warning), warning
