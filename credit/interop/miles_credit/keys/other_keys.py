"""Rows of the keys outside ``data``, ``model``, ``trainer`` and ``loss``."""

from __future__ import annotations

from credit.interop.miles_credit.keys.row import KeyRow, derived_rows, ignored_rows, mapped_rows, refused_rows

_BUDGET_BLOCK = (
    "this package closes budgets differently, so the model would change; remove the block, or set "
    "`model.postprocess` yourself, see docs/constraints.md"
)

ROWS: tuple[KeyRow, ...] = (
    *mapped_rows("12", "save_loc", "`save_loc`"),
    *mapped_rows("12", "seed", "`seed`"),
    *refused_rows(
        "12", "custom_models custom_objects", "write a plugin, see docs/extend.md", harmless_values=(None, [])
    ),
    # Forecasts.
    *derived_rows("1", "predict.forecasts.days", "`inference.lead_time`"),
    *ignored_rows("12", "predict.*", "forecasts have separate keys; set `inference`, see docs/migration.md"),
    *derived_rows("2", "inference.batch_forecast.forecast_length", "`inference.lead_time`"),
    *refused_rows("2", "inference.data.*", "forecasts use the sources of `data`; add the files to `data.sources`"),
    *ignored_rows("2", "inference.preblocks.* inference.postblocks.*", "forecasts use the transforms of training"),
    *ignored_rows("2", "inference.*", "forecasts have separate keys; set `inference`, see docs/migration.md"),
    # Normalisation and transforms of generation 2.
    *mapped_rows("2", "preblocks.per_step.NAME.type preblocks.NAME.type", "`data.transforms`, `data.input_order`"),
    *mapped_rows(
        "2", "preblocks.per_step.NAME.args.* preblocks.NAME.args.*", "`data.transforms`, `data.variable_options`"
    ),
    *mapped_rows(
        "2", "postblocks.per_step.NAME.type postblocks.NAME.type", "`data.variable_options`, for `tracer_fixer`"
    ),
    *mapped_rows("2", "postblocks.per_step.NAME.args.* postblocks.NAME.args.*", "`data.variable_options`"),
    # Sections that do not describe the model or its training.
    *ignored_rows("12", "pbs.* slurm.*", "jobs are written by `credit submit`; set `pbs` or `slurm`, see docs/hpc.md"),
    *ignored_rows("12", "visualization.* diagnostics.* metrics.*", "`credit verify` has separate keys"),
    *ignored_rows("12", "ptype.* use_ptype", "precipitation type is computed from forecasts by another program"),
    *ignored_rows("12", "scaler.*", "training in miles-credit reads `data.mean_path` and `data.std_path`"),
    *ignored_rows("1", "data_defaults.*", "a YAML anchor; the keys that use it are converted"),
    *refused_rows("1", "sampling.* image_size.*", "regional downscaling; this package trains global models only"),
    *refused_rows("1", "postprocessing.*", "a section of CAMulator; see `model.type`"),
)

# Type of a postblock -> reason why it is refused. A type that is neither here nor in `IGNORED_POSTBLOCKS` is unknown.
REFUSED_POSTBLOCKS = {
    "global_mass_fixer": _BUDGET_BLOCK,
    "global_water_fixer": _BUDGET_BLOCK,
    "global_energy_fixer": _BUDGET_BLOCK,
    "global_energy_fixer_updown": _BUDGET_BLOCK,
    "wind_artifact_filter": "a filter of the wind over steep terrain has no counterpart",
    "wet_mask_samudra": "set `data.variable_options.NAME.missing: fill_mean` for masked variables",
    "hybrid_level_interp": "interpolation between levels inside a step; see `data.sources.N.vertical`",
    "semilagrangian_advection": "advection inside a step has no counterpart",
}
# Type of a postblock -> reason why it needs no counterpart.
IGNORED_POSTBLOCKS = {
    "reconstruct": "outputs have names and levels",
    "flatten_to_tensor": "outputs have names and levels",
    "bridgescaler_transform": "outputs are in physical units",
    "exp_transform": "the transform of the input is inverted in every output",
    "square_transform": "the transform of the input is inverted in every output",
    "geopotential_diagnostic": "`inference.derive` computes geopotential, which is not part of the loss",
    "mslp_diagnostic": "`inference.derive` computes mean sea level pressure, which is not part of the loss",
    "pressure_interp_diagnostic": "`inference.pressure_levels` interpolates forecasts",
}
