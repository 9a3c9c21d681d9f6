"""Tables of miles-credit's config keys and their replacements, for error messages and for the documentation.

``python -m credit.config.migration`` prints the tables. A test compares the tables with docs/migration.md.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """Row of a migration table: keys of miles-credit with the same meaning, and their replacement in this package.

    Attributes:
        generation_1: dotted keys of the older of the two config formats of miles-credit, separated by spaces.
        generation_2: dotted keys of the newer config format, separated by spaces.
        replacement: the keys of this package, or a description of their replacement, as Markdown.
        is_changed: True if both packages have a key with this name, but with different values.
    """

    generation_1: str
    generation_2: str
    replacement: str
    is_changed: bool = False

    @property
    def keys(self) -> list[str]:
        """Dotted keys in this row, of both config formats of miles-credit."""
        return [*self.generation_1.split(), *self.generation_2.split()]


def _build_common_row(keys: str, replacement: str, is_changed: bool = False) -> Row:
    """Return a `Row` for keys that have the same names in both config formats of miles-credit."""
    return Row(keys, keys, replacement, is_changed)


_DATA = (
    Row("", "data.source", "`data.sources` for the files, `data.variables` for the groups"),
    Row(
        "data.variables",
        "data.source.NAME.variables.prognostic.vars_3D",
        "`data.variables.prognostic.vars_3D`",
        is_changed=True,
    ),
    Row(
        "data.surface_variables",
        "data.source.NAME.variables.prognostic.vars_2D",
        "`data.variables.prognostic.vars_2D`",
    ),
    Row(
        "data.dynamic_forcing_variables",
        "data.source.NAME.variables.dynamic_forcing.vars_2D",
        "`data.variables.dynamic_forcing.vars_2D`",
    ),
    Row(
        "data.diagnostic_variables",
        "data.source.NAME.variables.diagnostic.vars_2D",
        "`data.variables.diagnostic.vars_2D`",
    ),
    Row("data.static_variables", "data.source.NAME.variables.static.vars_2D", "`data.variables.static.vars_2D`"),
    Row(
        "data.save_loc data.save_loc_surface data.save_loc_dynamic_forcing data.save_loc_diagnostic "
        "data.save_loc_static",
        "data.source.NAME.variables.GROUP.path",
        "one entry of `data.sources` for each key, or one entry for all of them",
    ),
    Row(
        "data.level_ids",
        "data.source.NAME.levels data.source.NAME.level_coord",
        "`data.levels` with `data.level_units: model_level`; the coordinate is found by its attributes",
    ),
    Row("data.mean_path data.std_path data.scaler_type", "loss.args.scaler_path", "fitted by `credit preprocess`"),
    Row(
        "",
        "preblocks postblocks",
        "no single key: `credit preprocess` fits the statistics, `data.transforms` has the transforms, "
        "`model.postprocess` the fixers, and `data.input_order` the order of the input channels",
    ),
    Row(
        "data.train_years data.valid_years",
        "data.start_datetime data.end_datetime validation_data",
        "`data.splits.train`, `data.splits.valid`, and `data.splits.test` for the scores",
    ),
    Row("data.lead_time_periods", "data.timestep data.lead_time_periods", "`data.timestep`"),
    Row("data.history_len data.valid_history_len", "data.history_len", "`data.history_len`"),
    Row(
        "data.forecast_len",
        "data.forecast_len",
        "`data.forecast_len`, from 1; generation 1 counts from 0",
        is_changed=True,
    ),
    Row(
        "data.valid_forecast_len",
        "validation_data.forecast_len",
        "`data.valid_forecast_len`, from 1; generation 1 counts from 0",
        is_changed=True,
    ),
    Row("data.backprop_on_timestep", "trainer.backprop_on_timestep", "`trainer.backprop_on_timestep`, steps from 1"),
    Row("data.static_first", "preblocks.per_step.concat", "`data.input_order`"),
    Row("data.save_loc_physics", "", "`data.coefficients` for the half levels; cell areas are derived from the grid"),
    Row("data.skip_periods data.one_shot data.retain_graph", "data.skip_periods data.one_shot", "none"),
    Row("data.dataset_type", "data.source.NAME.dataset_type", "none: netCDF, zarr and GRIB are recognised"),
)

_FROM_VARIABLES = (
    "model.levels model.channels model.surface_channels model.input_only_channels model.output_only_channels"
)
_MODEL = (
    _build_common_row("model.type", "`model.type`"),
    _build_common_row("model.image_height model.image_width", "derived from the grid"),
    _build_common_row(_FROM_VARIABLES, "derived from `data.variables`"),
    _build_common_row("model.frames", "derived from `data.history_len`"),
    _build_common_row(
        "model.patch_height model.patch_width model.frame_patch_size",
        "`model.patch_size` for FuXi; a WXFormer has none",
    ),
    _build_common_row("model.dim model.depth model.dim_head", "`model.dim`, `model.depth`, `model.dim_head`"),
    _build_common_row(
        "model.global_window_size model.local_window_size", "`model.global_window_size`, `model.local_window_size`"
    ),
    _build_common_row(
        "model.cross_embed_kernel_sizes model.cross_embed_strides",
        "`model.cross_embed_kernel_sizes`, `model.cross_embed_strides`",
    ),
    _build_common_row("model.attn_dropout model.ff_dropout", "`model.attn_dropout`, `model.ff_dropout`"),
    _build_common_row("model.use_spectral_norm model.interp", "`model.use_spectral_norm`, `model.interp`"),
    _build_common_row(
        "model.upsample_with_ps",
        "`model.decoder`: `pixel_shuffle` for `type: wxformer`, `transposed` for `type: crossformer`",
    ),
    _build_common_row(
        "model.upsample_v_conv model.decoder_attention_type", "none: WXFormer does not have these options"
    ),
    _build_common_row("model.padding_conf model.padding_conf.activate", "`model.padding`; null for none"),
    _build_common_row("model.padding_conf.mode", "`model.padding.mode`"),
    _build_common_row(
        "model.padding_conf.pad_lat model.padding_conf.pad_lon",
        "`model.padding.lat`, `model.padding.lon`, in rows north and south, columns west and east; or `auto`",
    ),
    Row(
        "",
        "",
        "for published weights, set `model.padding.pole: published` and `model.position_bias_index: published`",
    ),
    Row("model.post_conf", "", "`model.postprocess`, a list; see [Bounds and budgets](constraints.md)"),
    Row(
        "model.post_conf.tracer_fixer",
        "postblocks",
        "`data.variable_options.NAME.minimum`, or `clamp` in `model.postprocess`",
    ),
    Row(
        "model.post_conf.global_mass_fixer model.post_conf.global_water_fixer model.post_conf.global_energy_fixer",
        "postblocks",
        "`dry_mass`, `water`, `energy` in `model.postprocess`, see [Bounds and budgets](constraints.md); computed on "
        "whole columns, in float64; `energy` scales only temperature; on pressure levels `dry_mass` corrects surface "
        "pressure, not humidity",
    ),
)

_LOSS = (
    Row("loss.training_loss", "loss.type loss.args loss.args.training_loss", "`loss.kind`: mse, mae, huber"),
    Row(
        "loss.validation_loss",
        "loss.args.validation_loss",
        "the training loss; `trainer.monitor` chooses the metric that selects the weights",
    ),
    Row(
        "loss.use_latitude_weights loss.latitude_weights",
        "loss.args.use_latitude_weights loss.args.latitude_weights",
        "`loss.latitude_weights`, true or false; cell areas are derived from the grid",
        is_changed=True,
    ),
    Row(
        "loss.use_variable_weights loss.variable_weights",
        "loss.args.var_weighting loss.args.variable_weights",
        "`loss.weights`; `loss.scaling`",
    ),
    Row(
        "loss.use_power_loss loss.use_spectral_loss loss.spectral_lambda_reg loss.spectral_wavenum_init",
        "",
        "none; a similar loss is `loss.kind: amse`, which compares power by total wavenumber",
    ),
)

# One of these keys is misspelled on purpose, because many files of miles-credit contain this spelling.
_LOADING = (
    "trainer.load_weights trainer.load_optimizer trainer.load_scaler trainer.load_scheduler trainer.load_sheduler "
    "trainer.reload_epoch"
)
_TRAINER = (
    _build_common_row("trainer.type", "none: there is only one trainer"),
    Row("trainer.mode", "trainer.parallelism", "`trainer.parallelism`"),
    Row("", "trainer.parallelism.domain", "`trainer.parallelism.domain`"),
    _build_common_row(
        "trainer.epochs trainer.num_epoch trainer.start_epoch",
        "`trainer.num_epoch` or `trainer.max_steps`, the total length of the run",
    ),
    _build_common_row(
        "trainer.batches_per_epoch", "none; `trainer.validate_every` and `trainer.checkpoint_every` count steps"
    ),
    _build_common_row("trainer.valid_batches_per_epoch", "`trainer.valid_samples`, spread over the whole period"),
    _build_common_row("trainer.skip_validation", "none: every run validates; `trainer.validate_every` counts steps"),
    _build_common_row(
        "trainer.train_batch_size trainer.valid_batch_size", "`trainer.train_batch_size`, `trainer.valid_batch_size`"
    ),
    _build_common_row("trainer.learning_rate trainer.weight_decay", "`trainer.learning_rate`, `trainer.weight_decay`"),
    _build_common_row(
        "trainer.scheduler trainer.use_scheduler trainer.update_learning_rate",
        "`trainer.schedule.kind`, `trainer.schedule.warmup` (a fraction of the run), `trainer.schedule.final` (a "
        "fraction of the peak)",
    ),
    Row("trainer.amp trainer.mixed_precision", "trainer.amp", "`trainer.amp`: bfloat16 autocast, float32 parameters"),
    _build_common_row("trainer.grad_accum_every", "`trainer.grad_accum_every`"),
    _build_common_row(
        "trainer.grad_max_norm", "`trainer.grad_max_norm`, a number; `dynamic` is not supported", is_changed=True
    ),
    Row(
        "trainer.activation_checkpoint trainer.checkpoint_all_layers",
        "trainer.activation_checkpoint",
        "`trainer.activation_checkpoint`",
    ),
    _build_common_row("trainer.compile", "`trainer.compile`"),
    Row("", "trainer.use_ema trainer.ema_decay", "`trainer.use_ema`, `trainer.ema_decay`"),
    Row("", "trainer.use_tensorboard", "`trainer.loggers: [tensorboard]`"),
    _build_common_row("trainer.stopping_patience", "`trainer.patience`"),
    _build_common_row(_LOADING, "`trainer.resume`"),
    _build_common_row(
        "trainer.save_backup_weights trainer.save_best_weights",
        "none: both are always saved; `trainer.keep_last` sets the number of checkpoints",
    ),
    Row("trainer.save_metric_vars", "", "none: `metrics.jsonl` contains the metrics of every variable"),
    _build_common_row(
        "trainer.thread_workers trainer.valid_thread_workers trainer.prefetch_factor", "`data.num_workers`"
    ),
    Row(
        "trainer.ensemble_size", "trainer.ensemble_size", "`trainer.members`, with `loss.kind: crps` and `model.noise`"
    ),
    Row("trainer.cpu_offload", "", "`trainer.parallelism.cpu_offload`"),
)

_FORECASTS = (
    Row("predict predict.mode", "inference.run_mode inference.mode", "`inference`; the ranks share the forecasts"),
    Row(
        "predict.forecasts",
        "inference.batch_forecast",
        "`inference.initial_times.start`, `inference.initial_times.end`, `inference.initial_times.every`, or a list of "
        "times; and `inference.lead_time`",
    ),
    Row("predict.forecasts.days", "inference.batch_forecast.forecast_length", "`inference.lead_time`"),
    Row(
        "predict.realtime",
        "inference.single_forecast",
        "a list with one time in `inference.initial_times`; and `inference.lead_time`",
    ),
    Row("predict.save_forecast", "inference.save_forecast", "`forecasts/` in `save_loc`, or `inference.folder`"),
    Row("predict.save_vars", "inference.output.variables", "`inference.variables`"),
    Row("", "inference.output inference.output.format", "`inference.format`"),
    Row("", "inference.output.output_interval", "`inference.output_every`"),
    Row("predict.batch_size", "inference.batch_size", "`inference.batch_size`"),
    Row(
        "predict.metadata predict.ua_var_encoding predict.pressure_var_encoding predict.surface_var_encoding",
        "inference.output.metadata inference.output.encoding",
        "none: the attributes of the data are copied",
    ),
    Row("predict.climatology", "", "`verification.climatology.path` with `method: file`, or fitted"),
    Row("predict.use_laplace_filter", "", "`inference.hyperdiffusion`"),
    Row("predict.interp_pressure", "", "`inference.pressure_levels`"),
)

_JOBS = (
    _build_common_row("pbs", "`pbs` or `slurm`, with `credit submit`; see [Run on a cluster](hpc.md)"),
    _build_common_row("pbs.project slurm.project", "`pbs.account`, `slurm.account`"),
    _build_common_row(
        "pbs.conda slurm.conda",
        "`pbs.python`, `slurm.python`: the Python interpreter of the job, by default the "
        "interpreter that runs `credit submit`",
    ),
    _build_common_row("pbs.job_name slurm.job_name", "`experiment`, which is also the name of the jobs"),
    _build_common_row("pbs.ncpus slurm.ncpus", "`pbs.cpus_per_node`, `slurm.cpus_per_node`"),
    _build_common_row("pbs.ngpus slurm.ngpus", "`pbs.gpus_per_node`, `slurm.gpus_per_node`"),
    _build_common_row("pbs.mem slurm.mem", "`pbs.memory`, `slurm.memory`"),
    _build_common_row(
        "pbs.walltime slurm.walltime",
        "`pbs.walltime`, `slurm.walltime`, written as 12h instead of 12:00:00",
        is_changed=True,
    ),
    _build_common_row("pbs.gpu_type", "`pbs.chunk: {gpu_type: NAME}`"),
    Row("", "slurm.env_setup", "`slurm.setup`"),
)

TABLES: dict[str, Sequence[Row]] = {
    "Data": _DATA,
    "Model": _MODEL,
    "Loss": _LOSS,
    "Trainer": _TRAINER,
    "Forecasts": _FORECASTS,
    "Jobs": _JOBS,
}


def find_replacement(key: str, only_changed: bool = False) -> str | None:
    """Return the replacement of a key of miles-credit for an error message; None if the key is not a key of
    miles-credit.

    Args:
        key: the dotted key.
        only_changed: True to search only keys that exist in both packages with different values (`Row.is_changed`).
    """
    for row in itertools.chain.from_iterable(TABLES.values()):
        if key in row.keys and (row.is_changed or not only_changed):
            # A message cannot contain a link, so replace the link with the path of the page.
            return re.sub(r"\[[^\]]*\]\(([\w.]+)\)", r"docs/\1", row.replacement)
    return None


def describe_table(title: str) -> str:
    """Return the table of `TABLES` that has this title as Markdown."""
    lines = ["| generation 1 | generation 2 | here |", "|---|---|---|"]
    for row in TABLES[title]:
        first_keys = _describe_keys(row.generation_1.split())
        second_keys = _describe_keys(row.generation_2.split())
        if second_keys and row.generation_1 == row.generation_2:
            second_keys = "same"
        lines.append(f"| {first_keys} | {second_keys} | {row.replacement} |")
    return "\n".join(lines) + "\n"


def _describe_keys(keys: Sequence[str]) -> str:
    """Return keys in backticks; a key in the same section as the preceding key is shortened to its last part."""
    shown = []
    previous_section = None
    for key in keys:
        section, _, name = key.rpartition(".")
        if section == previous_section:
            shown.append(f"`{name}`")
        else:
            shown.append(f"`{key}`")
        previous_section = section
    return ", ".join(shown)


if __name__ == "__main__":
    for heading in TABLES:
        print(f"## {heading}\n\n{describe_table(heading)}")
