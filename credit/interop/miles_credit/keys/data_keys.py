"""Rows of the keys under ``data`` and ``validation_data``."""

from __future__ import annotations

from credit.interop.miles_credit.keys.row import KeyRow, derived_rows, ignored_rows, mapped_rows, refused_rows

_DOWNSCALING = "regional downscaling; this package trains global models only"
_OCEAN = "the data set of the ocean emulator Samudra has a separate reader; list the fields in `data.sources`"
_WRF = "boundary data of a regional model; this package trains global models only"

_GENERATION_1: list[KeyRow] = [
    *mapped_rows("1", "data.variables", "`data.variables.prognostic.vars_3D`"),
    *mapped_rows("1", "data.surface_variables", "`data.variables.prognostic.vars_2D`"),
    *mapped_rows("1", "data.dynamic_forcing_variables", "`data.variables.dynamic_forcing.vars_2D`"),
    *mapped_rows("1", "data.diagnostic_variables", "`data.variables.diagnostic.vars_2D`"),
    *mapped_rows("1", "data.static_variables", "`data.variables.static.vars_2D`"),
    *mapped_rows(
        "1",
        "data.save_loc data.save_loc_surface data.save_loc_dynamic_forcing data.save_loc_diagnostic "
        "data.save_loc_static",
        "`data.sources`",
    ),
    *mapped_rows("1", "data.level_ids", "`data.levels`, `data.level_units`"),
    *derived_rows("1", "data.levels", "the number of `data.levels`"),
    *mapped_rows("1", "data.train_years data.valid_years", "`data.splits`; the last year is not part of the period"),
    *mapped_rows("1", "data.lead_time_periods", "`data.timestep`, in hours"),
    *mapped_rows("1", "data.valid_forecast_len", "`data.valid_forecast_len`, plus 1"),
    *derived_rows("1", "data.valid_history_len", "`data.history_len`, which training and validation share"),
    *mapped_rows("1", "data.static_first", "`data.input_order`"),
    *ignored_rows(
        "1",
        "data.save_loc_physics data.level_info_file",
        "half levels and areas for the budget fixers; `data.coefficients` has the half levels",
    ),
    *ignored_rows("1", "data.save_loc_forcing", "used only with `data.forcing_variables`"),
    *refused_rows(
        "1",
        "data.forcing_variables",
        "a yearly cycle of forcing that is already normalised in its file; list the variables in "
        "`data.variables.dynamic_forcing`, and set `times: cyclic` in their source",
        harmless_values=(None, []),
    ),
    *refused_rows(
        "1",
        "data.sst_forcing.activate",
        "it replaces the skin temperature over the ocean; list sst in `data.variables.dynamic_forcing` instead",
        harmless_values=(None, False),
    ),
    *ignored_rows(
        "1", "data.sst_forcing.varname_skt data.sst_forcing.varname_ocean_mask", "used only with `data.sst_forcing`"
    ),
    *ignored_rows("1", "data.total_time_steps data.max_forecast_len",
                  "only one trainer of miles-credit reads these limits"),
    *ignored_rows("1", "data.timestep", "generation 1 reads `data.lead_time_periods` instead"),
    *ignored_rows("1", "data.quant_path", "used only with a quantile scaler"),
    *refused_rows(
        "1",
        "data.datasets.* data.image_width data.image_height data.rootpath data.first_date data.last_date "
        "data.time_step data.sample_len data.transform data.normalize",
        _DOWNSCALING,
    ),
    *refused_rows(
        "1",
        "data.data_path data.dynamic_forcing_vars_key data.prognostic_vars_key data.boundary_vars_key "
        "data.wet_mask_save_path data.input_length data.output_length",
        _OCEAN,
    ),
    *refused_rows("1", "data.TOA_forcing_path", "radiation for the graph network; see `model.type`"),
    *refused_rows("1", "data.bs_data_path data.bs_file_format data.bs_years_train data.bs_years_val data.bs_years_test",
                  "backscatter data; this package has no network for them"),
    *refused_rows("1", "data.boundary.*", _WRF),
]  # fmt: skip

_GROUPS = ("prognostic", "diagnostic", "dynamic_forcing", "static")
_VARIABLE_PATHS = " ".join(
    f"data.source.NAME.variables.{group}.{name}" for group in _GROUPS for name in ("vars_3D", "vars_2D")
)
_FILE_PATHS = " ".join(f"data.source.NAME.variables.{group}.path" for group in _GROUPS)

_GENERATION_2: list[KeyRow] = [
    *mapped_rows("2", _VARIABLE_PATHS, "the same group in `data.variables`"),
    *mapped_rows("2", _FILE_PATHS, "`data.sources`"),
    *ignored_rows(
        "2",
        " ".join(f"data.source.NAME.variables.{group}.filename_time_format" for group in _GROUPS),
        "the times are read from the time axis of each file",
    ),
    *mapped_rows("2", "data.source.NAME.levels", "`data.levels`"),
    *derived_rows("2", "data.source.NAME.level_coord", "`data.level_units`; the coordinate is found by its attributes"),
    *derived_rows(
        "2", "data.source.NAME.dataset_type", "`data.sources`: files, a public zarr store, or computed radiation"
    ),
    *derived_rows("2", "data.source.NAME.resolution", "the name of the public zarr store in `data.sources`"),
    *ignored_rows(
        "2",
        "data.source.NAME.lat_spec data.source.NAME.lon_spec data.source.NAME.num_integration_steps",
        "the radiation is computed on the grid of the data, with a fixed integration error",
    ),
    *ignored_rows(
        "2",
        "data.source.NAME.calendar data.source.NAME.time_coord data.source.NAME.engine data.source.NAME.grid_type",
        "calendar, coordinates and format are recognised in the files",
    ),
    *refused_rows(
        "2",
        "data.source.NAME.temporal_mode data.source.NAME.cycle_year",
        "a representative year; set `times: cyclic` in the source yourself, see docs/data.md",
        harmless_values=(None,),
    ),
    *refused_rows(
        "2",
        "data.source.NAME.mode data.source.NAME.product data.source.NAME.extent",
        "a regional analysis (HRRR); this package trains global models only",
    ),
    *mapped_rows("2", "data.start_datetime data.end_datetime", "`data.splits.train`"),
    *mapped_rows("2", "data.timestep", "`data.timestep`"),
    *ignored_rows("2", "data.lead_time_periods", "`data.timestep` has the same meaning"),
    *ignored_rows("2", "data.static_first", "generation 2 orders channels by group; see `data.input_order`"),
    *derived_rows(
        "2", "validation_data.start_datetime validation_data.end_datetime", "`data.splits.valid`, `data.splits.test`"
    ),
    *mapped_rows("2", "validation_data.forecast_len", "`data.valid_forecast_len`"),
    *mapped_rows("2", "data.valid_forecast_len", "`data.valid_forecast_len`"),
    *derived_rows(
        "2", "validation_data.source.*", "`data.sources`; variables and levels must be the same as in `data.source`"
    ),
    *derived_rows(
        "2", "validation_data.timestep validation_data.history_len", "the same keys in `data`; the values must agree"
    ),
    *ignored_rows(
        "2",
        "validation_data.lead_time_periods validation_data.one_shot validation_data.skip_periods "
        "validation_data.static_first validation_data.scaler_type validation_data.mean_path validation_data.std_path",
        "the same key in `data` is converted",
    ),
]

_BOTH: list[KeyRow] = [
    *mapped_rows("12", "data.history_len", "`data.history_len`"),
    *mapped_rows("12", "data.forecast_len", "`data.forecast_len`; generation 1 counts from 0, so 1 is added"),
    *mapped_rows("12", "data.backprop_on_timestep", "`trainer.backprop_on_timestep`"),
    *derived_rows(
        "12",
        "data.mean_path data.std_path",
        "the default of `credit convert --mean` and `--std`; a new training run fits new statistics",
    ),
    *derived_rows("12", "data.scaler_type", "fitted statistics of each channel, as for `std_new`"),
    *refused_rows(
        "12",
        "data.skip_periods",
        "training on every n-th time of the data; set `data.timestep` or `data.sample_every`",
        harmless_values=(None, 1),
    ),
    *refused_rows("12", "data.data_clamp", "clamping of the normalised input has no counterpart", (None,)),
    *ignored_rows("12", "data.one_shot", "`trainer.backprop_on_timestep` selects the steps of the loss"),
    *ignored_rows("12", "data.retain_graph", "the key does not change the values of gradients"),
    *derived_rows("1", "data.dataset_type", "the format of the files is recognised"),
    *ignored_rows("2", "data.dataset_type", "the format of the files is recognised"),
]

ROWS: tuple[KeyRow, ...] = (*_BOTH, *_GENERATION_1, *_GENERATION_2)
