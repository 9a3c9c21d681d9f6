"""Small configs of miles-credit for tests, and functions that change them."""

from __future__ import annotations

import copy
from typing import Any

_NETWORK: dict[str, Any] = {
    "type": "crossformer",
    "frames": 1,
    "image_height": 16,
    "image_width": 32,
    "levels": 2,
    "channels": 1,
    "surface_channels": 1,
    "input_only_channels": 3,
    "output_only_channels": 1,
    "patch_height": 1,
    "patch_width": 1,
    "frame_patch_size": 1,
    "dim": [8, 16, 32, 64],
    "depth": [1, 1, 1, 1],
    "dim_head": 8,
    "global_window_size": [4, 2, 1, 1],
    "local_window_size": [4, 2, 1, 1],
    "cross_embed_kernel_sizes": [[2, 4], [2, 4], [2, 4], [2, 4]],
    "cross_embed_strides": [2, 2, 2, 2],
    "attn_dropout": 0.0,
    "ff_dropout": "1e-1",
    "use_spectral_norm": False,
    "interp": True,
    "upsample_with_ps": True,
    "upsample_v_conv": False,
    "padding_conf": {"activate": True, "mode": "earth", "pad_lat": 8, "pad_lon": [8, 8]},
    "post_conf": {
        "activate": True,
        "grid": "equiangular",
        "tracer_fixer": {"activate": True, "denorm": True, "tracer_name": ["rain"], "tracer_thres": ["1e-10"]},
        "global_mass_fixer": {"activate": False, "midpoint": True},
    },
}
_TRAINER: dict[str, Any] = {
    "activation_checkpoint": False,
    "cpu_offload": False,
    "compile": False,
    "amp": False,
    "epochs": 4,
    "batches_per_epoch": 10,
    "valid_batches_per_epoch": 3,
    "train_batch_size": 2,
    "valid_batch_size": 2,
    "grad_accum_every": 2,
    "learning_rate": "1e-3",
    "weight_decay": "1e-5",
    "use_scheduler": True,
    "scheduler": {"scheduler_type": "linear-warmup-cosine", "warmup_steps": 5, "total_steps": 20, "min_lr": 1.0e-5},
    "grad_max_norm": "dynamic",
    "use_ema": True,
    "ema_decay": 0.99,
    "use_tensorboard": False,
    "stopping_patience": 3,
    "load_weights": True,
    "thread_workers": 2,
    "ensemble_size": 1,
    "skip_validation": False,
    "backprop_on_timestep": [1, 2],
}

GENERATION_1: dict[str, Any] = {
    "save_loc": "run",
    "seed": 7,
    "data": {
        "variables": ["t"],
        "save_loc": "data_*.nc",
        "surface_variables": ["t2m"],
        "save_loc_surface": "data_*.nc",
        "dynamic_forcing_variables": ["sst", "tsi"],
        "save_loc_dynamic_forcing": "data_*.nc",
        "diagnostic_variables": ["rain"],
        "save_loc_diagnostic": "data_*.nc",
        "static_variables": ["ground"],
        "save_loc_static": "data_*.nc",
        "level_ids": [500, 850],
        "levels": 2,
        "mean_path": "mean.nc",
        "std_path": "std.nc",
        "scaler_type": "std_new",
        "dataset_type": "ERA5_MultiStep_Batcher",
        "train_years": [1979, 2010],
        "valid_years": [2010, 2014],
        "history_len": 1,
        "valid_history_len": 1,
        "forecast_len": 1,
        "valid_forecast_len": 3,
        "backprop_on_timestep": [1, 2],
        "lead_time_periods": 6,
        "static_first": True,
        "skip_periods": None,
        "one_shot": True,
        "forcing_variables": [],
        "save_loc_physics": "physics.nc",
        "level_info_file": "levels.nc",
    },
    "model": _NETWORK,
    "trainer": _TRAINER | {"type": "era5", "mode": "fsdp", "domain_parallel_size": 2},
    "loss": {
        "training_loss": "huber",
        "validation_loss": "mse",
        "training_loss_parameters": {"delta": 2},
        "use_latitude_weights": True,
        "latitude_weights": "weights.nc",
        "use_variable_weights": True,
        "variable_weights": {"t": [1, "2e0"], "t2m": 0.5, "rain": 0.1},
        "use_power_loss": False,
        "use_spectral_loss": False,
    },
    "predict": {"forecasts": {"days": 5, "start_year": 2015}, "save_forecast": "forecasts"},
    "pbs": {"project": "P", "walltime": "12:00:00"},
}

_VARIABLES = {
    "prognostic": {"vars_3D": ["t"], "vars_2D": ["t2m"], "path": "data_*.nc"},
    "diagnostic": {"vars_2D": ["rain"], "path": "data_*.nc"},
    "dynamic_forcing": {"vars_2D": ["toa_incident_solar_radiation", "sst"], "path": "data_*.nc"},
    "static": {"vars_2D": ["ground"], "path": "data_*.nc"},
}
_SOURCE = {"FILES": {"dataset_type": "local", "level_coord": "level", "levels": [500, 850], "variables": _VARIABLES}}
GENERATION_2: dict[str, Any] = {
    "save_loc": "run",
    "seed": 7,
    "data": {
        "source": _SOURCE,
        "start_datetime": "1979-01-01",
        "end_datetime": "2009-12-31 18:00:00",
        "timestep": "6h",
        "history_len": 1,
        "forecast_len": 2,
        "scaler_type": "std_new",
        "mean_path": "mean.nc",
        "std_path": "std.nc",
    },
    "validation_data": {
        "source": _SOURCE,
        "start_datetime": "2010-01-01",
        "end_datetime": "2013-12-31",
        "timestep": "6h",
        "history_len": 1,
        "forecast_len": 4,
    },
    "preblocks": {
        "per_step": {
            "log": {"type": "log_transform", "args": {"variables": "FILES/diagnostic/2d/rain", "eps": "1e-6"}},
            "fill": {"type": "fill_values", "args": {"variables": ["FILES/dynamic_forcing/2d/sst"]}},
            "scaler": {"type": "bridgescaler_transform", "args": {"scaler_path": "s.json", "scaler_type": "standard"}},
            "concat": {"type": "concat"},
        }
    },
    "postblocks": {
        "per_step": {
            "reconstruct": {"type": "reconstruct", "args": {"detach": False}},
            "bounds": {
                "type": "tracer_fixer",
                "args": {"tracer_vars": ["FILES/diagnostic/2d/rain"], "tracer_thres": 0.0},
            },
        }
    },
    "model": _NETWORK | {"type": "wxformer"},
    "trainer": _TRAINER | {"type": "gen2", "parallelism": {"data": "ddp", "tensor": 1, "domain": 2}},
    "loss": {
        "type": "base",
        "args": {
            "training_loss": "huber",
            "base_loss_parameters": {"delta": 2},
            "var_weighting": "inverse_variance",
            "scaler_path": "s.json",
            "variable_weights": {},
            "normalize_weights": True,
            "use_latitude_weights": False,
        },
    },
    "inference": {"batch_forecast": {"forecast_length": "5d"}, "output": {"format": "netcdf"}},
}


def copy_example(generation: int) -> dict[str, Any]:
    """Return a copy of the example config of a generation."""
    return copy.deepcopy({1: GENERATION_1, 2: GENERATION_2}[generation])


def with_value(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a copy of a config in which a dotted key has a value; missing sections are added."""
    changed = copy.deepcopy(tree)
    *sections, name = key.split(".")
    node = changed
    for section in sections:
        if not isinstance(node.get(section), dict):
            node[section] = {}
        node = node[section]
    node[name] = value
    return changed


def remove_keys(tree: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Return a copy of a config without some dotted keys."""
    changed = copy.deepcopy(tree)
    for key in keys:
        *sections, name = key.split(".")
        node = changed
        for section in sections:
            node = node[section]
        del node[name]
    return changed
