"""Tests of the Python interface: from datasets in memory, forecasts and scores equal those of the commands."""

from __future__ import annotations

from contextlib import chdir
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import credit
from credit.api.prepared_forecast import LoadedModel
from credit.cli import main
from credit.errors import CheckpointError, ConfigError, DataError
from tests.unit.cli.world import write_world

# Two input times, a diagnostic variable, a forcing from data that persists as an anomaly.
OVERRIDES = [
    "data.history_len=2",
    "data.variables.prognostic.vars_2D=[]",
    "data.variables.diagnostic={vars_2D: [t2m]}",
    "inference.lead_time=18h",
    "inference.batch_size=1",
    "inference.initial_times=[2000-01-09T00:00, 2000-01-09T06:00]",
    "data.splits.test=[2000-01-08, 2000-01-10]",
    "verification.figure_leads=[18h]",
]


def run_command(name: str, *arguments: str) -> None:
    assert main._run_command(name, ["config.yml", *OVERRIDES, *arguments], f"credit {name}") == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a trained run, its forecasts, its scores and an exported file."""
    folder = tmp_path_factory.mktemp("api")
    write_world(folder)
    with chdir(folder):
        run_command("train")
        run_command("rollout")
        run_command("verify")
        run_command("convert", "--export", "weights.safetensors")
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> credit.Model:
    return credit.load(folder / "run", device="cpu")


@pytest.fixture(scope="module")
def fields(folder: Path) -> xr.Dataset:
    return xr.concat([xr.open_dataset(folder / f"data_{number}.nc") for number in (1, 2)], "time", data_vars="minimal")


@pytest.fixture(scope="module")
def written_forecasts(folder: Path) -> list[xr.Dataset]:
    """The forecasts that `credit rollout` has written."""
    return [xr.open_dataset(path) for path in sorted((folder / "run" / "forecasts").glob("*.nc"))]


def test_the_forecast_equals_that_of_the_command(
    model: credit.Model, fields: xr.Dataset, written_forecasts: list
) -> None:
    for expected in written_forecasts:
        forecast = model.forecast(fields, "18h", initial_time=expected["forecast_reference_time"].values)
        np.testing.assert_array_equal(forecast["forecast_period"] / np.timedelta64(1, "h"), expected["forecast_period"])
        plain = expected[list(forecast.data_vars)].drop_vars("forecast_period")
        xr.testing.assert_identical(forecast.drop_vars("forecast_period").drop_attrs(), plain.drop_attrs())
        for name in forecast.data_vars:
            assert forecast[name].attrs == expected[name].attrs
        common_attributes = {key: value for key, value in expected.attrs.items() if key in forecast.attrs}
        assert common_attributes == forecast.attrs


def test_an_exported_file_forecasts_the_same(model: credit.Model, folder: Path, fields: xr.Dataset) -> None:
    exported = credit.load(folder / "weights.safetensors", device="cpu")
    xr.testing.assert_equal(exported.forecast(fields, "12h"), model.forecast(fields, "12h"))
    assert exported.variables == model.variables and repr(exported).startswith("<credit.Model wxformer of ")


def test_a_checkpoint_is_loaded_by_its_path(model: credit.Model, folder: Path, fields: xr.Dataset) -> None:
    latest = credit.load(folder / "run", checkpoint="latest")
    reloaded_model = credit.load(latest.path)
    xr.testing.assert_identical(reloaded_model.forecast(fields, "6h"), latest.forecast(fields, "6h"))


def test_single_steps_give_the_forecast(model: credit.Model, fields: xr.Dataset) -> None:
    expected = model.forecast(fields, np.timedelta64(18, "h"), initial_time="2000-01-09")
    state = fields.sel(time=slice("2000-01-08T18:00", "2000-01-09T00:00"))
    for number in range(3):
        single = list(model.iterate(fields, "18h", initial_time="2000-01-09"))[number]
        xr.testing.assert_identical(single, expected.isel(time=[number]))
        state = model.step(state)
        newest = state.isel(time=[-1])
        for name in ("t", "t2m"):
            np.testing.assert_allclose(newest[name].values, single[name].values, rtol=1e-5, atol=1e-4)
        assert newest["time"].values == single["time"].values
    assert "sst" in state and state.sizes["time"] == model.num_input_times == 2


def test_a_lazy_dataset_gives_the_same_forecast(model: credit.Model, fields: xr.Dataset) -> None:
    pytest.importorskip("dask")
    xr.testing.assert_identical(model.forecast(fields.chunk({"time": 1}), "6h"), model.forecast(fields, "6h"))


def test_an_ensemble_has_spread_and_scores(model: credit.Model, fields: xr.Dataset) -> None:
    ensemble = {"stochastic": {}, "control": True}
    start = fields["time"].values[-3]
    forecast = model.forecast(fields, "12h", initial_time=start, members=3, ensemble=ensemble)
    assert forecast.sizes["member"] == 3
    single = model.forecast(fields, "12h", initial_time=start, members=1)
    np.testing.assert_allclose(forecast["t"].sel(member=0).values, single["t"].values, rtol=1e-5, atol=1e-4)
    assert (forecast["t"].std("member") > 0).any()
    scores = credit.score(forecast.isel(time=[0]), fields.isel(time=slice(-3, None)), allow_seen=True)
    assert np.isfinite(scores["crps_fair"].sel(forecast="model", season="all", region="global").values).all()
    with pytest.raises(ConfigError, match="the members would be equal with a network without model.noise"):
        model.forecast(fields, "12h", members=3)


def test_variables_of_a_model_are_described(model: credit.Model) -> None:
    variable_facts = {(v.name, v.group): (v.levels, v.units, v.source) for v in model.variables}
    assert variable_facts["t", "prognostic"] == ((500.0, 850.0), "K", "data")
    assert variable_facts["t2m", "diagnostic"][0] == ()
    assert variable_facts["sin_year", "dynamic_forcing"][2] == "computed"
    assert model.grid.shape == (16, 32) and model.time_step == np.timedelta64(6, "h")


def test_wrong_datasets_are_refused(model: credit.Model, fields: xr.Dataset) -> None:
    def read_error(dataset: xr.Dataset, **arguments: object) -> str:
        with pytest.raises(DataError) as caught:
            model.forecast(dataset, "6h", **arguments)
        return str(caught.value)

    assert '"t" is not in initial' in read_error(fields.drop_vars("t"))
    assert "no fields at" in read_error(fields.isel(time=[0]))
    assert "not among the 40 times of initial" in read_error(fields, initial_time="1950-01-01")
    assert "one dimension must have dates" in read_error(fields.isel(time=0))
    assert "grid" in read_error(fields.isel(lat=slice(None, None, 2), lon=slice(None, None, 2)))
    with pytest.raises(ConfigError, match="lead_time: 7h is not a multiple of the time step 6h"):
        model.forecast(fields, "7h")


def test_paths_without_a_model_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; give the folder of a run"):
        credit.load(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="no such checkpoint; train first"):
        credit.load(tmp_path)
    (tmp_path / "other.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="has no description of the model"):
        credit.load(tmp_path / "other.pt")
    with pytest.raises(ConfigError, match="inference.batch_sise"):
        credit.load(folder / "run", overrides=["inference.batch_sise=2"])
    with pytest.raises(ConfigError, match='checkpoint: "latest" selects a checkpoint of a run'):
        credit.load(folder / "weights.safetensors", checkpoint="latest")


@pytest.mark.parametrize("override", ["data.timestep=12h", "model.depth=[1, 1, 1, 2]", "trainer.max_steps=3"])
def test_overrides_that_contradict_the_weights_are_refused(folder: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="the model was trained with this setting"):
        credit.load(folder / "run", overrides=[override])


def test_overrides_change_units_and_ignore_settings_of_jobs(
    folder: Path, fields: xr.Dataset, model: credit.Model
) -> None:
    celsius = fields.assign(t=(fields["t"] - 273.15).assign_attrs(fields["t"].attrs, units="degC"))
    # Settings of jobs and files do not matter here.
    overrides = ["data.variable_options.t.units=K", "inference.parallelism.ensemble=2", "inference.keep_bits=8"]
    model_with_overrides = credit.load(folder / "run", device="cpu", overrides=overrides)
    forecast = model_with_overrides.forecast(celsius, "6h", members=1)
    expected = model.forecast(fields, "6h")
    np.testing.assert_allclose(forecast["t"].values, expected["t"].values, rtol=0.005)
    assert not np.array_equal(forecast["t"].values, expected["t"].values), "rounded to 8 bits"


def test_a_network_without_attributes_gets_those_of_the_data(model: credit.Model, fields: xr.Dataset) -> None:
    loaded = model._loaded
    loaded_without_attributes = LoadedModel(
        replace(loaded.assets, attributes={}),
        loaded._build_network,
        loaded.path,
        2,
        loaded.weights_checksum,
        loaded.device,
    )
    assert loaded_without_attributes.network is None
    model_without_attributes = credit.Model(loaded_without_attributes, model._raw_config, model._trained_config)
    # The data of a forecast have no units of a diagnostic variable.
    xr.testing.assert_equal(model_without_attributes.forecast(fields, "6h"), model.forecast(fields, "6h"))
    assert loaded_without_attributes.network is not None


def test_noise_of_one_forecast_does_not_affect_the_next(model: credit.Model, fields: xr.Dataset) -> None:
    expected = model.forecast(fields, "6h", members=1)
    noisy = model.forecast(fields, "6h", members=2, ensemble={"feature_noise": {}})
    assert (noisy["t"].std("member") > 0).any()
    xr.testing.assert_identical(model.forecast(fields, "6h", members=1), expected)
    assert not any(module._forward_hooks for module in model._loaded.network.modules())


def test_wrong_arguments_are_refused(model: credit.Model, fields: xr.Dataset, folder: Path) -> None:
    with pytest.raises(ConfigError, match='device: "gpu" is not a device; write auto, cpu, cuda or cuda:N'):
        credit.load(folder / "run", device="gpu")
    with pytest.raises(ConfigError, match="members: 1 is a forecast without perturbations"):
        model.forecast(fields, "6h", members=1, ensemble={"stochastic": {}})
    with pytest.raises(ConfigError, match="lead_time: NaT must be a positive whole number"):
        model.iterate(fields, np.timedelta64("NaT"))
    with pytest.raises(DataError, match="must be an xarray.Dataset, but is a DataArray"):
        model.forecast(fields["t"], "6h")
    with pytest.raises(ConfigError, match="overrides: give a list of strings"):
        credit.load(folder / "run", overrides="inference.amp=true")
    later = model.forecast(fields, timedelta(hours=6), initial_time=fields["time"][-2])
    assert later["forecast_reference_time"].values == fields["time"].values[-2]


def test_scores_equal_those_of_the_command(folder: Path, fields: xr.Dataset, written_forecasts: list) -> None:
    expected = xr.open_dataset(folder / "run" / "scores.nc")
    train = ("2000-01-01", "2000-01-04")
    settings = {"climatology_period": train, "climatology": {"harmonics": 0}}
    for forecast in (written_forecasts, folder / "run" / "forecasts"):
        scores = credit.score(forecast, fields, **settings)
        for name in ("rmse", "bias", "mae", "acc", "activity_ratio"):
            np.testing.assert_allclose(
                scores[name].sel(channel=expected["channel"].values).values, expected[name].values, rtol=1e-6
            )
    scores_without_climatology = credit.score(written_forecasts, fields, regions=["global", "tropics"])
    assert (
        scores_without_climatology["forecast"].values.tolist() == ["model", "persistence"]
        and "acc" not in scores_without_climatology
    )
    np.testing.assert_array_equal(
        scores_without_climatology["rmse"].sel(forecast="model", region="tropics").values,
        scores["rmse"].sel(forecast="model", region="tropics").values,
    )


def test_scoring_shows_its_progress_only_on_request(
    fields: xr.Dataset, written_forecasts: list, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output of tests is not a terminal, like that of a notebook."""
    credit.score(written_forecasts, fields)
    assert capsys.readouterr().err == ""
    credit.score(written_forecasts, fields, progress=True)
    assert "scoring: 100%" in capsys.readouterr().err


def test_forecasts_that_cannot_be_scored_are_refused(fields: xr.Dataset, written_forecasts: list) -> None:
    with pytest.raises(DataError, match="have no variable in common"):
        credit.score(written_forecasts, fields[["sst"]])
    with pytest.raises(DataError, match="contains times of the forecast from 2000-01-09"):
        credit.score(written_forecasts, fields, climatology_period=("2000-01-01", "2000-01-10"))
    with pytest.raises(DataError, match="neither the dimensions"):
        credit.score(fields, fields)
    with pytest.raises(DataError, match="has different lead times"):
        credit.score([written_forecasts[0], written_forecasts[1].isel(time=slice(2))], fields)
    with pytest.raises(DataError, match="two forecasts begin at 2000-01-09T00:00"):
        credit.score([written_forecasts[0], written_forecasts[0]], fields)
    with pytest.raises(DataError, match="truth has no time from 1990-01-01"):
        credit.score(written_forecasts, fields, climatology_period=("1990-01-01", "1990-02-01"))
    with pytest.raises(ConfigError, match=r"events\.warm: a quantile needs a climatology"):
        credit.score(written_forecasts, fields, events={"warm": {"channel": "t2m", "above_quantile": 0.9}})
    with pytest.raises(ConfigError, match="all_pairs: credit.score returns one table"):
        credit.score(written_forecasts, fields, all_pairs=True)


def test_forecasts_in_the_training_period_are_refused_by_default(model: credit.Model, fields: xr.Dataset) -> None:
    forecast = model.forecast(fields, "6h", initial_time="2000-01-02")
    with pytest.raises(DataError, match="allow_seen"):
        credit.score(forecast, fields)
    scores = credit.score(forecast, fields, allow_seen=True)
    assert "seen_periods_scored" in scores.attrs


def test_scores_of_some_variables_need_only_their_truth(fields: xr.Dataset, written_forecasts: list) -> None:
    surface = credit.score([forecast[["t2m"]] for forecast in written_forecasts], fields)
    assert surface["channel"].values.tolist() == ["t2m"] and "seen_periods_scored" not in surface.attrs
    # Neither other levels nor times before the forecasts matter.
    truth = fields.sel(level=[850]).where(fields["time"] > np.datetime64("2000-01-05"))
    scores = credit.score(written_forecasts, truth)
    assert sorted(scores["channel"].values.tolist()) == ["t2m", "t850"]
    np.testing.assert_array_equal(
        scores["rmse"].sel(channel="t2m", forecast="model"), surface["rmse"].sel(channel="t2m", forecast="model")
    )


def test_metrics_are_read_and_figures_are_drawn(
    folder: Path, model: credit.Model, fields: xr.Dataset, written_forecasts: list
) -> None:
    metrics = credit.read_metrics(folder / "run")
    assert metrics.index.tolist() == [1, 2] and metrics["valid/loss"].notna().any()
    scores = credit.score(written_forecasts, fields)
    figures = (
        credit.plot_metrics(metrics),
        credit.plot_scores(scores, ["t500"]),
        credit.plot_map(written_forecasts[0]["t"].isel(time=0, level=1)),
        credit.plot_map(fields["t2m"].isel(time=0), land=fields["ground"], title="t2m"),
    )
    # Notebooks show a figure by this method.
    assert figures[0]._repr_png_().startswith(b"\x89PNG")
    titles = [figure.axes[0].get_title() for figure in figures]
    assert titles[1:] == ["t500", "t, level 850, 2000-01-09 06:00 UTC", "t2m"]
    assert len(figures[1].axes) == 1, "without a climatology there is no correlation"
    with pytest.raises(DataError, match="select one time, level and member"):
        credit.plot_map(written_forecasts[0]["t"])
    with pytest.raises(ConfigError, match='channels: "t900" is not scored'):
        credit.plot_scores(scores, ["t900"])
    with pytest.raises(DataError, match="metrics.jsonl does not exist"):
        credit.read_metrics(folder)
