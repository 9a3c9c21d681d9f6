"""What a checkpoint carries beside weights comes back the same; other data are refused."""

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
from credit.train.assets import ModelAssets, fit_assets, require_same_fields
from credit.train.build import build_normalizer
from credit.train.initial_condition_checks import describe_distribution_shift, find_masked_cells
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


def world(config: Config) -> AnalyticReader:
    calendar, grid = Calendar(), make_grid(8, 16)
    generator = np.random.default_rng(0)
    pattern = generator.normal(size=grid.shape)
    times = calendar.parse("2000-01-01") + 360 * np.arange(1464)

    def field(minutes: int, channel: int) -> np.ndarray:
        return 7 + pattern * np.cos(2 * np.pi * minutes / 525600 + channel) + 0.3 * np.cos(minutes / 1000)

    masks = {"sst": pattern > 0.5}
    return AnalyticReader(config.data.channel_map(), grid, calendar, times, field, masks)


@pytest.fixture(scope="module")
def fitted() -> tuple[AnalyticReader, ModelAssets]:
    config = build_config(RAW)
    reader = world(config)
    return reader, fit_assets(config, reader, build_splits(config.data, reader.calendar)["train"])


def test_round_trip(fitted: tuple[AnalyticReader, ModelAssets]) -> None:
    reader, assets = fitted
    again = ModelAssets.load(json.loads(json.dumps(assets.meta())), assets.tensors())
    assert again.channels == assets.channels
    assert again.grid.describe_mismatch(assets.grid) is None
    assert again.statistics.names == assets.statistics.names
    np.testing.assert_array_equal(again.statistics.tendency_std, assets.statistics.tendency_std)
    np.testing.assert_array_equal(again.static_CHW, assets.static_CHW)
    np.testing.assert_array_equal(again.masks["sst"], reader.masks["sst"])
    later = reader.calendar.parse("2001-05-01")
    np.testing.assert_array_equal(again.climatology.at(later), assets.climatology.at(later))
    require_same_fields(again, reader, Path("step"))


def test_wind_is_only_scaled(fitted: tuple[AnalyticReader, ModelAssets]) -> None:
    """Across a pole u becomes -u; in normalised space that is a change of sign only where 0 is no wind."""
    _, assets = fitted
    assert assets.statistics.select(["u850"]).mean[0] == 0
    assert assets.statistics.select(["t850"]).mean[0] == pytest.approx(7, abs=0.5)


def test_other_data_are_refused(fitted: tuple[AnalyticReader, ModelAssets]) -> None:
    reader, assets = fitted
    fewer = ChannelMap.build({"prognostic": {"vars_3D": ["u"], "vars_2D": ["t2m"]}}, [850])
    with pytest.raises(CheckpointError, match="t850"):
        require_same_fields(replace(assets, channels=fewer), reader, Path("step"))
    with pytest.raises(DataError, match="16 x 32 cells against 8 x 16"):
        require_same_fields(replace(assets, grid=make_grid(16, 32)), reader, Path("step"))
    celsius = {**assets.attributes, "t2m": {"units": "degC"}}
    with pytest.raises(
        DataError, match='t2m: the data are in K.*trained on degC; data.variable_options.t2m.units: "degC"'
    ):
        require_same_fields(replace(assets, attributes=celsius), reader, Path("step"))
    heights = {**assets.attributes, "t2m": {"units": "m"}}
    with pytest.raises(DataError, match="trained on m; these units measure different quantities: correct the units"):
        require_same_fields(replace(assets, attributes=heights), reader, Path("step"))


def test_cells_that_training_lacked_are_hidden_and_others_must_be_there(
    fitted: tuple[AnalyticReader, ModelAssets],
) -> None:
    reader, assets = fitted
    sst = assets.masks["sst"]
    assert find_masked_cells(assets, reader, Path("step")) == {}
    for masks, name in (({}, "sst"), ({"sst": ~sst}, "sst")):
        with pytest.raises(DataError, match=rf"{name}: the data are missing in {sst.sum()} cells where the checkpoint"):
            find_masked_cells(replace(assets, masks=masks), reader, Path("step"))
    wider = {"sst": sst | np.roll(sst, 1, axis=1), "t2m": ~sst}
    hidden = find_masked_cells(replace(assets, masks=wider), reader, Path("step"))
    frames, names = FrameReader(reader, build_config(RAW).data, None, hidden), [c.name for c in reader.channels.stored]
    shown, own = frames.state(int(reader.times[0])), reader.read(0)
    for row, name in enumerate(names[: len(shown)]):
        np.testing.assert_array_equal(shown[row], np.where(wider.get(name, False), np.nan, own[row]))


def test_cells_of_what_no_forecast_reads_need_not_be_there(fitted: tuple[AnalyticReader, ModelAssets]) -> None:
    _, assets = fitted
    raw = json.loads(json.dumps(RAW))
    raw["data"]["variables"] |= {"diagnostic": {"vars_2D": ["tp"]}, "static": {"vars_2D": ["lsm"]}}
    reader = world(build_config(raw))
    reader.masks |= {"tp": reader.masks["sst"], "lsm": reader.masks["sst"]}
    ours = replace(assets, channels=reader.channels)
    assert find_masked_cells(ours, reader, Path("step")) == {}
    wider = {name: mask | ~mask for name, mask in reader.masks.items()}
    assert find_masked_cells(replace(ours, masks=wider), reader, Path("step")).keys() == {"sst"}


def test_fields_far_from_those_of_training_are_named(fitted: tuple[AnalyticReader, ModelAssets]) -> None:
    reader, assets = fitted
    normalizer = build_normalizer(build_config(RAW), assets)
    number = len(assets.channels.group("prognostic"))
    names = [channel.name for channel in assets.channels.group("prognostic")]
    fields = reader.read(0)[:number].copy()
    fields[names.index("u850")] -= 7  # this world's wind has a mean
    assert describe_distribution_shift(assets, normalizer, fields, "now") == ""
    fields[names.index("t2m")] -= 7 * assets.statistics.select(["t2m"]).std[0]
    said = describe_distribution_shift(assets, normalizer, fields, "now")
    assert re.search(r"of now are unlike.* deviations by t2m -[678]\S*;", said), said
