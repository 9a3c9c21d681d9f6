"""Values of converted configs, and the files that cannot be converted."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from credit.config import Config
from credit.config.load import build_config
from credit.errors import ConfigError
from credit.interop.miles_credit import convert_file, convert_tree
from credit.interop.miles_credit.keys.row import Disposition
from credit.interop.miles_credit.sections.networks import NETWORKS
from credit.interop.miles_credit.sections.periods import derive_periods
from tests.unit.interop.examples import copy_example, remove_keys, with_value


def convert_config(tree: dict[str, Any]) -> Config:
    """Return the converted config."""
    conversion = convert_tree(tree, "file.yml")
    assert conversion.report.keys_with(Disposition.REFUSED) == [], conversion.report.describe_refused()
    return build_config(yaml.safe_load(conversion.yaml_text), origin="file.yml")


def find_refused_keys(tree: dict[str, Any]) -> dict[str, str]:
    """Return the refused keys of a config and their reasons."""
    report = convert_tree(tree, "file.yml").report
    return {key: report.entries[key].text for key in report.keys_with(Disposition.REFUSED)}


def test_generation_1() -> None:
    config = convert_config(copy_example(1))
    data = config.data
    assert (config.save_loc, config.seed) == ("run", 7)
    # With one path for all variables there is one source.
    assert [(source.path, source.variables) for source in data.sources] == [("data_*.nc", None)]
    assert data.variables.dynamic_forcing.vars_2D == ["sst", "toa_incident_solar_radiation"]
    assert data.variable_options["sst"].in_forecast == "observed"
    assert data.variable_options["rain"].minimum == 1e-10
    assert (data.levels, data.level_units) == ([500, 850], "hPa")
    assert data.input_order == ["prognostic", "static", "dynamic_forcing"]
    # Generation 1 counts steps from 0.
    assert (data.forecast_len, data.valid_forecast_len, data.timestep) == (2, 4, "6h")
    # The last year of a period does not belong to it.
    assert data.splits.train == ["1979-01-01", "2009-12-21"]
    assert data.splits.valid[0] == "2010-01-01" and data.splits.test[1] == "2013-12-31"
    model = config.model
    assert (model.type, model.decoder, model.residual) == ("wxformer", "transposed", False)
    assert (model.padding.mode, model.padding.lat, model.padding.lon) == ("earth", [8, 8], [8, 8])
    assert (model.padding.pole, model.position_bias_index, model.ff_dropout) == ("published", "published", 0.1)
    trainer = config.trainer
    # 4 epochs of 10 batches, two of which make a step; texts such as 1e-3 are numbers.
    assert (trainer.max_steps, trainer.validate_every, trainer.valid_samples) == (20, 5, 6)
    assert (trainer.learning_rate, trainer.weight_decay, trainer.grad_max_norm) == (1e-3, 1e-5, None)
    assert (trainer.schedule.warmup, trainer.schedule.final) == (0.25, 0.01)
    assert (trainer.parallelism.data, trainer.parallelism.domain) == ("fsdp2", 1)
    assert (trainer.patience, trainer.backprop_on_timestep, data.num_workers) == (3, [1, 2], 2)
    loss = config.loss
    assert (loss.kind, loss.huber_delta, loss.scaling) == ("huber", 2, "state")
    assert loss.weights == {"t500": 1, "t850": 2, "t2m": 0.5, "rain": 0.1}
    assert config.inference.lead_time == "120h"


def test_generation_2() -> None:
    config = convert_config(copy_example(2))
    data = config.data
    assert data.input_order == ["prognostic", "dynamic_forcing", "static"]
    # Generation 2 counts steps from 1.
    assert (data.forecast_len, data.valid_forecast_len) == (2, 4)
    assert data.splits.train == ["1979-01-01", "2009-12-21"]
    transform = data.transforms["rain"]
    assert (transform.kind, transform.unit) == ("log1p", 1e-6)
    # Of the bounds in `post_conf` and in the postblocks, the narrower one is used.
    assert data.variable_options["rain"].minimum == 1e-10
    assert data.variable_options["sst"].missing == "fill_mean"
    assert config.model.decoder == "pixel_shuffle"
    assert (config.trainer.parallelism.data, config.trainer.parallelism.domain) == ("ddp", 2)
    assert config.trainer.ema_decay == 0.99
    assert config.loss.latitude_weights is False
    assert config.inference.lead_time == "120h"


def test_hidden_defaults_of_generation_1() -> None:
    tree = remove_keys(
        copy_example(1), "data.static_first", "data.valid_forecast_len", "trainer.amp", "trainer.activation_checkpoint",
        "trainer.use_ema", "trainer.grad_max_norm", "model.padding_conf", "model.dim_head", "model.interp",
        "model.use_spectral_norm",
    )  # fmt: skip
    config = convert_config(tree)
    assert config.data.input_order == ["prognostic", "static", "dynamic_forcing"]
    assert config.data.valid_forecast_len == 2
    assert (config.trainer.amp, config.trainer.activation_checkpoint, config.trainer.use_ema) == (False, True, False)
    assert config.trainer.grad_max_norm is None
    assert (config.model.padding, config.model.dim_head, config.model.interp) == (None, 32, True)
    assert config.model.use_spectral_norm is True
    tree = remove_keys(tree, "model.cross_embed_strides", "model.dim", "model.frames")
    report = convert_tree(tree, "file.yml").report
    # The class has two input frames by default, unlike the data.
    assert report.entries["model.frames"].disposition is Disposition.REFUSED
    assert "[4, 2, 2, 2]" in report.entries["model.cross_embed_strides"].text


def test_hidden_defaults_of_generation_2() -> None:
    tree = remove_keys(copy_example(2), "seed", "trainer.amp", "trainer.activation_checkpoint", "data.forecast_len",
                       "validation_data.forecast_len", "trainer.backprop_on_timestep", "trainer.ema_decay")  # fmt: skip
    config = convert_config(tree)
    assert (config.seed, config.trainer.amp, config.trainer.activation_checkpoint) == (42, True, False)
    assert (config.data.forecast_len, config.data.valid_forecast_len, config.trainer.ema_decay) == (1, 1, 0.9999)


def test_dynamic_forcing_first() -> None:
    config = convert_config(with_value(copy_example(1), "data.static_first", False))
    assert config.data.input_order == ["prognostic", "dynamic_forcing", "static"]


def test_padding_of_older_files() -> None:
    tree = with_value(remove_keys(copy_example(1), "model.padding_conf"), "model.pad_lat", 4)
    padding = convert_config(with_value(tree, "model.pad_lon", "8")).model.padding
    assert (padding.mode, padding.lat, padding.lon) == ("mirror", [4, 4], [8, 8])
    assert convert_config(with_value(copy_example(1), "model.padding_conf.activate", False)).model.padding is None


def test_the_decoder_follows_from_the_class() -> None:
    tree = with_value(copy_example(1), "model.type", "wxformer")
    assert convert_config(with_value(tree, "model.upsample_with_ps", False)).model.decoder == "pixel_shuffle"
    assert convert_config(with_value(tree, "model.upsample_v_conv", True)).model.decoder == "pixel_shuffle"
    assert "model.upsample_v_conv" in find_refused_keys(with_value(copy_example(1), "model.upsample_v_conv", True))


@pytest.mark.parametrize(
    ("case", "network"), [("wxformer_transposed_earth", "crossformer"), ("wxformer_pixelshuffle_mirror", "wxformer")]
)
def test_networks_of_the_golden_numbers_are_converted(repository: Path, case: str, network: str) -> None:
    """The conversion gives the model section that reproduces the stored numbers of miles-credit."""
    path = repository / "tests" / "data" / "golden" / f"{case}.json"
    settings = json.loads(path.read_text(encoding="utf-8"))["wxformer"]
    tree = with_value(copy_example(1), "data.history_len", settings["frames"])
    tree = with_value(tree, "data.valid_history_len", settings["frames"])
    padding = settings.pop("padding")
    decoder = settings.pop("decoder")
    model = {key: value for key, value in settings.items() if key not in ("in_channels", "out_channels")}
    model["padding_conf"] = {
        "activate": True, "mode": padding["mode"], "pad_lat": padding["lat"], "pad_lon": padding["lon"],
    }  # fmt: skip
    section = convert_config(with_value(tree, "model", {"type": network, **model})).model
    assert section.decoder == decoder
    assert section.padding.model_dump() == {**padding, "pole": "published"}
    for key in set(model) - {"padding_conf", "image_height", "image_width", "frames", "output_frames"}:
        assert getattr(section, key) == settings[key], key


def test_schedules() -> None:
    tree = with_value(copy_example(1), "trainer.scheduler", {"scheduler_type": "cosine-annealing", "T_max": 4})
    schedule = convert_config(tree).trainer.schedule
    assert (schedule.kind, schedule.warmup, schedule.final) == ("cosine", 0, 0)
    restarts = {"scheduler_type": "cosine-annealing-restarts", "first_cycle_steps": 10, "warmup_steps": 4,
                "max_lr": "2e-3", "min_lr": 2e-5}  # fmt: skip
    trainer = convert_config(with_value(tree, "trainer.scheduler", restarts)).trainer
    assert (trainer.learning_rate, trainer.schedule.warmup, trainer.schedule.final) == (2e-3, 0.2, 0.01)
    assert convert_config(with_value(tree, "trainer.use_scheduler", False)).trainer.schedule.kind == "constant"
    assert "plateau" in find_refused_keys(with_value(tree, "trainer.scheduler.scheduler_type", "plateau")).popitem()[1]


def test_ensemble_without_dropout_is_refused() -> None:
    tree = with_value(with_value(copy_example(1), "loss.training_loss", "KCRPS"), "trainer.ensemble_size", 3)
    config = convert_config(tree)
    assert (config.loss.kind, config.trainer.members, config.loss.alpha) == ("crps", 3, 1.0)
    assert [(noise.kind, noise.rate) for noise in config.model.noise] == [("dropout", 0.1)]
    assert list(find_refused_keys(with_value(tree, "model.ff_dropout", 0))) == ["trainer.ensemble_size"]
    assert convert_config(with_value(tree, "trainer.ensemble_size", 1)).loss.kind == "mae"
    assert list(find_refused_keys(with_value(tree, "loss.training_loss", "mse"))) == ["trainer.ensemble_size"]


def test_number_of_levels_without_level_ids() -> None:
    tree = remove_keys(copy_example(1), "data.level_ids", "data.levels", "loss.variable_weights.t")
    assert list(find_refused_keys(tree)) == ["data.level_ids"]
    config = convert_config(with_value(tree, "model.levels", 16))
    assert len(config.data.levels) == 16 and config.data.level_units == "model_level"


def test_levels_are_read_from_file_of_means(tmp_path: Path) -> None:
    import xarray as xr

    xr.Dataset({"t": ("level", [1.0, 2.0])}, {"level": [300.0, 700.5]}).to_netcdf(tmp_path / "mean.nc")
    tree = remove_keys(copy_example(1), "data.level_ids", "data.levels")
    config = convert_config(with_value(tree, "data.mean_path", str(tmp_path / "mean.nc")))
    assert config.data.levels == [300, 700.5] and config.data.level_units == "hPa"


@pytest.mark.parametrize("name", [name for name, network in NETWORKS.items() if network.convert is None])
def test_networks_without_a_counterpart(name: str) -> None:
    tree = with_value(copy_example(1), "model.type", name)
    # Keys of the other network are not refused as well.
    assert list(find_refused_keys(with_value(tree, "model.embed_dim", 8))) == ["model.type"]


def test_an_unknown_network() -> None:
    assert (
        "networks with a conversion are"
        in find_refused_keys(with_value(copy_example(2), "model.type", "wxfromer"))["model.type"]
    )


def test_a_file_without_a_model() -> None:
    assert "no section `model`" in find_refused_keys(remove_keys(copy_example(2), "model"))["model.type"]


@pytest.mark.parametrize(
    ("generation", "key", "value"),
    [
        (1, "data.train_years", ["1979", "1980"]),
        (1, "data.lead_time_periods", "six"),
        (1, "data.skip_periods", 6),
        (1, "data.valid_history_len", 2),
        (1, "data.forcing_variables", ["co2"]),
        (1, "data.scaler_type", "quantile-cached"),
        (1, "data.levels", 3),
        (1, "trainer.mode", "horovod"),
        (1, "trainer.type", "ic-opt"),
        (1, "trainer.learning_rate", "fast"),
        (1, "trainer.learning_rate", 0),
        (1, "trainer.epochs", 1.5),
        (1, "loss.training_loss", "logcosh"),
        (1, "loss.variable_weights.t", [1, 2, 3]),
        (1, "loss.use_spectral_loss", True),
        (1, "model.padding_conf.mode", "flat"),
        (1, "model.padding_conf.pad_lat", [1, 2, 3]),
        (1, "model.post_conf.global_mass_fixer.activate", True),
        (1, "data.static_variables", ["sst"]),
        (2, "data.source.FILES.dataset_type", "hrrr"),
        (2, "data.source.FILES.levels", None),
        (2, "data.start_datetime", "yesterday"),
        (2, "data.timestep", "soon"),
        (2, "validation_data.timestep", "1h"),
        (2, "loss.type", "other"),
        (2, "loss.args.var_weighting", "learnable"),
        (2, "preblocks.per_step.more", {"type": "regrid"}),
        (2, "preblocks.per_step.fill.args.variables", ["FILES/static/2d/ice"]),
        (2, "preblocks.per_step.scaler.args.scaler_type", "minmax"),
        (2, "postblocks.per_step.more", {"type": "global_water_fixer"}),
    ],
)
def test_values_without_counterpart_are_refused(generation: int, key: str, value: Any) -> None:
    keys = find_refused_keys(with_value(copy_example(generation), key, value))
    assert keys and all(reason for reason in keys.values())


def test_all_refused_keys_are_named_at_once(tmp_path: Path) -> None:
    tree = with_value(with_value(copy_example(1), "trainer.mode", "horovod"), "data.nothing", 1)
    path = tmp_path / "theirs.yml"
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=r"2 keys prevent the conversion(.|\n)*trainer.mode(.|\n)*data.nothing"):
        convert_file(path)


def test_a_symbolic_link_and_repeated_anchors(tmp_path: Path) -> None:
    (tmp_path / "file.yml").write_text(yaml.safe_dump(copy_example(2)))
    (tmp_path / "link.yml").symlink_to("file.yml")
    assert "FILES" not in convert_file(tmp_path / "link.yml").yaml_text


@pytest.mark.parametrize("text", ["", "[1, 2]", "a: {", "data: {sources: []}"])
def test_files_that_are_not_configs_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.yml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="file.yml"):
        convert_file(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        convert_file(tmp_path / "missing.yml")


def test_environment_variables_need_not_be_set(tmp_path: Path) -> None:
    path = tmp_path / "file.yml"
    path.write_text(yaml.safe_dump(with_value(copy_example(1), "save_loc", "$SOME_SCRATCH/run")))
    assert "save_loc: $SOME_SCRATCH/run" in convert_file(path).yaml_text


def test_obstacles_of_weight_import_are_reported() -> None:
    # A filled variable gets a channel with its mask.
    assert convert_tree(copy_example(2), "file.yml").report.import_obstacles
    assert not convert_tree(copy_example(1), "file.yml").report.import_obstacles
    tree = remove_keys(copy_example(2), "preblocks.per_step.fill")
    assert not convert_tree(tree, "file.yml").report.import_obstacles
    tree_with_spatial_scaler = with_value(tree, "preblocks.per_step.scaler.args.spatial_variables", ["t2m"])
    assert convert_tree(tree_with_spatial_scaler, "file.yml").report.import_obstacles


def test_periods_are_derived() -> None:
    year_2000 = (date(2000, 1, 1), date(2000, 12, 31))
    # Without validation, the last fifth of the training period replaces it.
    periods = derive_periods(year_2000, None)
    assert periods.train[0] == date(2000, 1, 1) and periods.test[1] == date(2000, 12, 31)
    ordered = [*periods.train, *periods.valid, *periods.test]
    assert ordered == sorted(ordered)
    # Validation before training.
    periods = derive_periods((date(1990, 1, 1), date(2000, 12, 31)), (date(1990, 1, 1), date(1990, 12, 31)))
    assert periods.train == (date(1991, 1, 11), date(2000, 12, 31))
    # Short periods have no gap.
    periods = derive_periods((date(2000, 1, 1), date(2000, 1, 9)), (date(2000, 1, 9), date(2000, 1, 10)))
    assert (periods.train[1], periods.valid[0], periods.test[0]) == (
        date(2000, 1, 8),
        date(2000, 1, 9),
        date(2000, 1, 10),
    )
    assert periods.split_gap == "1min"
    assert derive_periods(year_2000, year_2000) is None


FUXI = {
    "type": "fuxi", "image_height": 16, "image_width": 32, "levels": 2, "channels": 1, "surface_channels": 1,
    "input_only_channels": 3, "output_only_channels": 1, "frames": 1, "frame_patch_size": 1, "patch_height": 2,
    "patch_width": 2, "dim": 16, "depth": 2, "num_heads": 4, "num_groups": 4, "window_size": 3, "drop_path": 0,
    "pad_lat": 4, "pad_lon": 4,
}  # fmt: skip


def test_fuxi_becomes_swin() -> None:
    conversion = convert_tree(with_value(copy_example(1), "model", FUXI), "file.yml")
    assert conversion.report.keys_with(Disposition.REFUSED) == [], conversion.report.describe_refused()
    model = yaml.safe_load(conversion.yaml_text)["model"]
    expected = {"type": "swin", "dim": 16, "depth": 2, "heads": 4, "num_groups": 4, "window_size": 3, "patch_size": 2,
                "edges": "published", "residual": False, "use_spectral_norm": True, "interp": True}  # fmt: skip
    assert expected.items() <= model.items()
    assert model["padding"] == {"mode": "mirror", "lat": [4, 4], "lon": [4, 4], "pole": "published"}
    build_config(yaml.safe_load(conversion.yaml_text), origin="file.yml")


@pytest.mark.parametrize(
    ("key", "value"), [("patch_width", 4), ("frame_patch_size", 2), ("frames", 2), ("use_noise", True)]
)
def test_fuxi_without_counterpart_is_refused(key: str, value: object) -> None:
    conversion = convert_tree(with_value(copy_example(1), "model", {**FUXI, key: value}), "file.yml")
    refused_keys = conversion.report.keys_with(Disposition.REFUSED)
    assert refused_keys and all(name.startswith("model.") for name in refused_keys)
