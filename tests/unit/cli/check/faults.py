"""Faults that ``credit check`` must report, each with parts of its message."""

from __future__ import annotations

import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from tests.unit.cli.check.fault import Fault
from tests.unit.cli.check.faults_forecasts import FORECASTS
from tests.unit.cli.world import (
    COLUMNS,
    change_source,
    change_store_attributes,
    coarsen_second_file,
    cut_to_hemisphere,
    damage_checkpoints,
    damage_chunk,
    drop_variables,
    hours_of_file,
    make_fields,
    make_files_overlap,
    make_static_with_time,
    make_t2m_in_celsius,
    make_uniform_t2m,
    put_value,
    remove_chunk,
    remove_last_manifest,
    rewrite_both_files,
    rewrite_file,
    truncate_second_file,
    write_data_file,
    write_failing_objective,
    write_failing_postprocess,
    write_model_plugin,
    write_slow_metrics,
    write_text_file,
)
from tests.unit.data.files_on_the_fly import write_file

STORE = "data.store=store.zarr"
SEEDED = ("plugins=[seeded_model]", "model={type: seeded}")


def build_disk_usage(free: int) -> SimpleNamespace:
    """Return a result of `shutil.disk_usage` with `free` bytes."""
    return SimpleNamespace(total=10**15, used=0, free=free)


KEYS = [
    Fault("a key that there is not", ["trainer.learning_rat", "did you mean"], ["trainer.learning_rat=1"]),
    Fault("a word for a number", ["trainer.max_steps", "'ten'"], ["trainer.max_steps=ten"]),
    Fault("two lengths of a run", ["exactly one of max_steps and num_epoch"], ["trainer.num_epoch=1"]),
    Fault("an ensemble of one", ["inference.ensemble.members: 1", "leave inference.ensemble out"],
          ["inference.ensemble={members: 1, lagged: 6h}"]),
    Fault("a variable that is not exported", ["NOT_THERE", "export it"], ["data.sources.0.path=$NOT_THERE/a.nc"]),
    Fault("no YAML", ["config.yml", "not valid YAML"], spoil=write_text_file("config.yml", "data: [1, 2")),
    Fault("a key given twice", ["given twice"], spoil=write_text_file("config.yml", "seed: 1\nseed: 2\n")),
    Fault("a model that there is not", ["model.type", "wxfromer"], ["model.type=wxfromer"]),
    Fault("a wrong key and a wrong file", ["no file matches"], ["seeed=1", "data.sources.0.path=none*.nc"], count=2),
    Fault("a plugin that is not there", ["plugins", "no_such_plugin"], ["plugins=[no_such_plugin]"]),
    Fault("options of a variable that there is not", ["variable_options names", "t2n"],
          ["data.variable_options.t2n.minimum=0"]),
    Fault("an option without effect", ["no effect"], ["data.variable_options.ground.in_forecast=observed"]),
    Fault("an output interval that is no multiple", ["inference.output_every", "not a multiple"],
          ["inference.output_every=4h"]),
    Fault("lead times that are no multiple", ["inference.lead_times", "not a multiple"], ["inference.lead_times=[4h]"]),
    Fault("lead times beyond the forecast", ["lead_times: 96h is longer"], ["inference.lead_times=[24h, 96h]"]),
    Fault("lead times in disorder", ["lead_times: 24h, 12h must increase"], ["inference.lead_times=[24h, 12h]"]),
    Fault("two ways to choose lead times", ["lead_times and output_every"],
          ["inference.lead_times=[12h]", "inference.output_every=12h"]),
    Fault("names of zarr for netCDF", ["weatherbench2", "format: zarr"], ["inference.layout=weatherbench2"]),
    Fault("a ramp without lengths", ["trainer.forecast_len_from: is empty"],
          ["trainer.forecast_len_from={}", "trainer.backprop_on_timestep=[1]"]),
    Fault("a ramp to another length", ["trainer.forecast_len_from"], ["trainer.forecast_len_from={0: 1, 0.5: 3}"]),
]  # fmt: skip

FILES = [
    Fault("no file", ["data.sources.0.path", "no file matches"], ["data.sources.0.path=none_*.nc"]),
    Fault("one file of a list", ["data.sources.0.path", "data_3.nc does not exist"],
          ["data.sources.0.path=[data_1.nc, data_2.nc, data_3.nc]"]),
    Fault("a truncated file", ["data_2.nc", "cannot be read"], spoil=truncate_second_file),
    Fault("a file that is no netCDF", ["data_2.nc", "cannot be read"], spoil=write_text_file("data_2.nc", "hello")),
    Fault("two grids", ["different grids", "data_2.nc"], spoil=coarsen_second_file),
    Fault("two calendars", ["calendar", "noleap", "data_2.nc"], spoil=rewrite_file(calendar="noleap")),
    Fault("two units", ['t2m is in "K"', '"degC"', "data_2.nc"],
          spoil=rewrite_file(attributes={"t2m": {"units": "degC"}})),
    Fault("a variable that no file has", ['"t2n" is in no file', "did you mean"],
          ["data.variables.prognostic.vars_2D=[t2n]"]),
    Fault("two variables that no file has", ['"sst" is in no file'], spoil=drop_variables("sst", "t2m"), count=2),
    Fault("a level that the files lack", ["t has no level 700"], ["data.levels=[500, 700]"]),
    Fault("levels that a second file lacks", ["data_2.nc", "t has no level 850"],
          spoil=rewrite_file(levels=[500, 700])),
    Fault("levels in Pa called hPa", ["data.levels", "50000 hPa", "level_units: Pa"], ["data.levels=[50000, 85000]"],
          count=2),
    Fault("one variable's levels in Pa", ["data.levels", "50000 hPa"], ["data.variable_options.t.levels=[50000]"],
          count=2),
    Fault("files in Pa that say hPa", ["t has no level 500"], spoil=rewrite_both_files(levels=[50000, 85000])),
    Fault("levels of a model", ["level", "not in units of pressure"], spoil=rewrite_both_files(level_units="1")),
    Fault("pressure levels taken for a model's", ["data.level_units is model_level"],
          ["data.level_units=model_level"]),
    Fault("a 3-D variable listed as 2-D", ["t is in vars_2D", "2 levels"],
          ["data.variables.prognostic={vars_2D: [t, t2m]}"]),
    Fault("a 2-D variable listed as 3-D", ["t2m is in vars_3D", "no levels"],
          ["data.variables.prognostic={vars_3D: [t, t2m]}"]),
    Fault("half a globe", ["only global grids"], spoil=cut_to_hemisphere),
    Fault("no time axis", ["time axis"], ["data.variables.prognostic={vars_2D: [ground]}",
          "data.variables.static.vars_2D=[]", "data.variables.dynamic_forcing.vars_2D=[]"]),
    Fault("a time in two files with other values", ["differs between", "data_2.nc"], spoil=make_files_overlap,
          count=3),
    Fault("a missing value", ["t2m at 2000-01-01T00:00", "missing (NaN)", "data.variable_options.t2m.missing"],
          spoil=put_value("t2m", (0, 0, 0), np.nan)),
    Fault("a missing value and no sample", ["t2m at 2000-01-01T00:00", "missing (NaN)"],
          [f"data.splits.{name}=['{year}-01-01', '{year}-01-03']"
           for name, year in (("train", 2001), ("valid", 2002), ("test", 2003))],
          spoil=put_value("t2m", (0, 0, 0), np.nan), count=4),
    Fault("an infinite value", ["t, level 850", "infinite"], spoil=put_value("t", (0, 1, 3, 3), np.inf)),
    Fault("a mask that moves", ["sst", "mask that changes in time"], ["data.variable_options.sst.missing=fill_mean"],
          spoil=put_value("sst", (7, 0, 0), np.nan)),
    Fault("a static field with missing values", ["ground", "missing"], spoil=rewrite_both_files(lambda file: {
          "ground": np.where(np.arange(COLUMNS) < 3, np.nan, make_fields()["ground"]).astype(np.float32)})),
    Fault("a static field that moves", ["ground", "varies in time"], spoil=rewrite_both_files(make_static_with_time)),
    Fault("Celsius called Kelvin", ["data_1.nc: t2m at", "the limits of temperature in K"],
          spoil=rewrite_both_files(make_t2m_in_celsius)),
    Fault("a temperature in Pa", ["t2m", '"Pa"', "temperature"],
          spoil=rewrite_both_files(attributes={"t2m": {"units": "Pa"}})),
    Fault("a height called geopotential", ["z, level 500 at", "the limits of geopotential in m2 s-2"],
          ["data.variables.prognostic={vars_3D: [z]}"],
          spoil=rewrite_both_files(
              lambda file: {"z": make_fields()["t"] * 0.1 + np.array([5500, 1500], np.float32)[:, None, None]},
              attributes={"z": {"units": "m2 s-2", "standard_name": "geopotential"}})),
    Fault("an output that never changes", ["t2m: one value everywhere"], spoil=rewrite_both_files(make_uniform_t2m)),
    Fault("a sum over another interval", ["data.variable_options.t2m.temporal", "24h"],
          ["data.variable_options.t2m.temporal=accumulate", "data.timestep=6h"],
          spoil=lambda folder: [write_data_file(folder, file, hours=[24 * n for n in range(20 * file - 20, 20 * file)])
                                for file in (1, 2)], count=4),
]  # fmt: skip

SPLITTING = [
    Fault("a period that runs backwards", ["data.splits.test", "before"],
          ["data.splits.test=['2000-01-09', '2000-01-08T06:00']"]),
    Fault("periods too near to each other", ["data.split_gap"],
          ["data.splits.valid=['2000-01-04T12:00', '2000-01-06']"]),
    Fault("a period outside the data", ["data.splits.valid", "no data in this period"],
          ["data.splits.valid=['2001-01-06', '2001-01-07']"]),
    Fault("a day that the calendar lacks", ["data.splits.train", "2000-02-30"],
          ["data.splits.train=['2000-01-01', '2000-02-30']"]),
    Fault("a rollout longer than its period", ["data.splits.train", "no complete sample"], ["data.forecast_len=16"]),
    Fault("a validation longer than its period", ["data.splits.valid", "no complete sample"],
          ["data.valid_forecast_len=4"]),
    Fault("a history longer than its period", ["data.splits.test", "history_len 4"], ["data.history_len=4"], count=2),
    Fault("a step that the data lack", ["steps of 5h", "need 2 consecutive times"],
          ["data.timestep=5h", "inference.lead_time=10h", "inference.initial_times.every=10h",
           "verification.figure_leads=[10h]"], count=3),
    Fault("a period without two times in a row", ["data.splits.valid", "is missing: 2000-01-06T06:00"],
          ["data.valid_forecast_len=1"],
          spoil=rewrite_file(hours=[h for h in hours_of_file(2) if h % 12 == 0], values=lambda: make_fields(10)),
          count=2),
    Fault("more samples a step than there are", ["trainer.train_batch_size 8", "16 samples per step", "has 15"],
          ["trainer.train_batch_size=8", "trainer.grad_accum_every=2"]),
    Fault("more samples than there are, on many ranks", ["8 ranks with different samples", "16 samples per step"],
          arguments=["--world-size", "8"]),
]  # fmt: skip

STORES = [
    Fault("a store of other channels", ["data.store", "written from a different config", "t850"],
          [STORE, "data.levels=[500]"], needs="store"),
    Fault("a store of other sources", ["data.store", "data.sources"],
          [STORE, "data.sources.0.path=[data_1.nc, data_2.nc]"], needs="store"),
    Fault("an unfinished store", ["data.store", "not complete"], [STORE], needs="store",
          spoil=change_store_attributes("credit", lambda meta: meta.update(complete=False))),
    Fault("statistics of another period", ["data.store", "statistics", "credit preprocess"],
          [STORE, "data.splits.train=['2000-01-01', '2000-01-03']"], needs="store"),
    Fault("a store without a period", ["data.store", "but data.splits need"],
          [STORE, "data.splits.test=['2000-01-08', '2000-01-10']"], needs="store"),
    Fault("a store of another version", ["data.store", "format 0"], [STORE], needs="store",
          spoil=change_store_attributes("credit", lambda meta: meta.update(format=0))),
    Fault("a store with a lost field", ["store.zarr", "2000-01-01T00:00", "lost", "run credit preprocess CONFIG"],
          [STORE], needs="store", spoil=remove_chunk),
    Fault("a store with a lost field that no sample of the check needs", ["2000-01-02T06:00", "lost"], [STORE],
          needs="store", spoil=lambda folder: remove_chunk(folder, 5)),
    Fault("a store with a damaged field", ["2000-01-02T06:00", "checksum", "credit preprocess CONFIG --deep"], [STORE],
          needs="store", spoil=lambda folder: damage_chunk(folder, 5), arguments=["--deep"]),
    Fault("a store whose static fields are lost", ["static_fields", "lost", "credit preprocess"], [STORE],
          needs="store", spoil=lambda folder: shutil.rmtree(folder / "store.zarr" / "static_fields" / "c")),
    Fault("a store whose description is lost", ["fields", "zarr.json", "restore"], [STORE],
          needs="store", spoil=lambda folder: (folder / "store.zarr" / "fields" / "zarr.json").unlink()),
    Fault("a source that changed after the store was written", ["data_2.nc", "--redo-changed"], [STORE],
          needs="store", spoil=change_source),
    Fault("two sources that overlap in time", ["data.sources 0 and 1", "2000-01-05T18:00", "period"],
          ["data.sources=[{path: data_1.nc}, {path: data_2.nc}]"], spoil=make_files_overlap),
    Fault("a folder that is no store", ["data.store", "not a training store"], ["data.store=."]),
    Fault("no room for the store", ["data.store", "GiB are free"], [STORE], free=15 * 2**20),
    Fault("no room for the checkpoints", ["save_loc", "checkpoints", "GiB are free"], free=2**20),
    Fault("no room for the forecasts", ["save_loc", "forecasts", "GiB are free"],
          ["inference.initial_times={start: '2000-01-01', end: '2000-01-08', every: 6h}", "inference.lead_time=960h"],
          free=20 * 2**20),
]  # fmt: skip

MODELS = [
    Fault("a window that does not fit", ["model.local_window_size", "does not divide"], ["model.local_window_size=5"]),
    Fault("heads that do not fit", ["model.dim_head: 5"], ["model.dim_head=5"]),
    Fault("widths that do not double", ["model.dim", "double"], ["model.dim=[8, 16, 32, 65]"]),
    Fault("more padding than grid", ["model.padding.lat"], ["model.padding.lat=[40, 40]"]),
    Fault("layers to adapt that there are not", ["trainer.lora.targets", "nothing_like_it"],
          ["trainer.lora.targets=[nothing_like_it]", "trainer.resume=run/checkpoints/step_00000002",
           "save_loc=other"], needs="run"),
    Fault("adapters of nothing", ["trainer.lora", "trainer.resume"], ["trainer.lora.targets=['*.to_qkv']"]),
    Fault("a model of another shape", ["model.type: seeded returns (2, 4, 1, 16, 32)"], SEEDED,
          spoil=write_model_plugin("y = torch.cat([y, y[:, :1]], dim=1)")),
    Fault("a model that cannot be built", ["model.type: seeded cannot be built", "AttributeError"], SEEDED,
          spoil=write_model_plugin(init="self.none.weight")),
    Fault("a model that fails forward", ["model.type: seeded fails in the forward pass", "[5, 5]"], SEEDED,
          spoil=write_model_plugin("y = nn.functional.linear(y, torch.zeros(5, 5, device=y.device))")),
    Fault("a model that fails backward", ["model.type: seeded fails in the backward pass", "inplace"], SEEDED,
          spoil=write_model_plugin("z = y.exp(); y = z * 2; z += 1")),
    Fault("a model that cannot use bfloat16", ["model.type: seeded fails in bfloat16", "scatter"],
          [*SEEDED, "trainer.amp=true"], spoil=write_model_plugin(
          "y = torch.zeros(y.shape, device=y.device).scatter_add(1, torch.zeros_like(y, dtype=torch.long), y)")),
    Fault("a post-process that cannot be built",
          ["model.postprocess.1: seeded_postprocess", "cannot be built", "AttributeError"],
          ["plugins=[seeded_postprocess]", "model.postprocess=[{kind: hyperdiffusion}, {kind: seeded_postprocess}]"],
          spoil=write_failing_postprocess()),
    Fault("an objective that cannot be built",
          ["trainer.objective.kind: seeded_objective cannot be built: ValueError: no members"],
          ["plugins=[seeded_objective]", "trainer.objective={kind: seeded_objective}"],
          spoil=write_failing_objective()),
    Fault("an objective whose gradients fail",
          ["the training step outside the model fails", "trainer.objective.kind: seeded_objective", "IndexError"],
          ["plugins=[seeded_objective]", "trainer.objective={kind: seeded_objective}"],
          spoil=write_failing_objective("accumulate_gradients(self, batch, micro_step)", "IndexError('member 1')")),
    Fault("checkpointing of a model without blocks", ["trainer.activation_checkpoint", "_fsdp2_shard"],
          [*SEEDED, "trainer.activation_checkpoint=true"], spoil=write_model_plugin()),
    Fault("noise in a model without blocks",
          ["inference.ensemble.feature_noise", "_fsdp2_shard", "ensemble.stochastic"],
          [*SEEDED, "inference.ensemble={members: 2, feature_noise: {}}"], spoil=write_model_plugin()),
    Fault("a plugin that fails", ["plugins", "seeded_model", "missing_package"], SEEDED[:1],
          spoil=write_text_file("seeded_model.py", "import missing_package")),
    Fault("a plugin with a slip", ["plugins", "SyntaxError", "seeded_model.py"], SEEDED[:1],
          spoil=write_text_file("seeded_model.py", "x = = 1")),
    Fault("a plugin that raises", ["plugins", "ValueError: no", "seeded_model.py, line 1"], SEEDED[:1],
          spoil=write_text_file("seeded_model.py", "raise ValueError('no')")),
]  # fmt: skip

TRAINING = [
    Fault("a monitor that is not measured", ["trainer.monitor", "rmse/z500/6h"], ["trainer.monitor=rmse/z500/6h"]),
    Fault("a monitor beyond the rollout", ["trainer.monitor", "rmse/t500/48h"], ["trainer.monitor=rmse/t500/48h"]),
    Fault("a weight of what is not predicted", ["loss.weights", "z500"], ["loss.weights={z500: 2}"]),
    Fault("no weight at all", ["loss.weights"], ["loss.weights={t: 0, t2m: 0}"]),
    Fault("a weight below 0", ["loss.weights"], ["loss.weights={t2m: -1}"]),
    Fault("betas beyond 1", ["trainer.betas"], ["trainer.betas=[0.9, 1.5]"]),
    Fault("a ramp that ends too late", ["trainer.forecast_len_from", "after the last"],
          ["data.forecast_len=2", "trainer.forecast_len_from={0: 1, 0.9: 2}"]),
    Fault("early forecasts between two steps", ["trainer.preview.lead_time", "not a multiple"],
          ["trainer.preview.lead_time=7h"]),
    Fault("early forecasts longer than their period", ["trainer.preview.lead_time: 72h", "data.splits.valid"],
          ["trainer.preview={}"]),
    Fault("an early view of what is not predicted", ["trainer.preview.channels", "t2n"],
          ["trainer.preview={lead_time: 6h, channels: [t2n]}"]),
    Fault("no TensorBoard", ["trainer.loggers", "[tensorboard]"], ["trainer.loggers=[tensorboard]"],
          absent="tensorboard"),
    Fault("an unknown logger", ["trainer.loggers", "wandb"], ["trainer.loggers=[wandbb]"]),
]  # fmt: skip

RANKS = [
    Fault("ranks that do not factor", ["tensor 3 on 8 ranks", "(shard 1)"], ["trainer.parallelism.tensor=3"],
          arguments=["--world-size", "8"]),
    Fault("a split of nothing", ["trainer.parallelism.tensor", "splits no layer"], ["trainer.parallelism.tensor=5"],
          arguments=["--world-size", "5"]),
    Fault("whole copies that are split", ["ddp"], ["trainer.parallelism={data: ddp, tensor: 2}"],
          arguments=["--world-size", "4"]),
    Fault("no data parallelism on many ranks", ["data none", "tensor must be the number of ranks"],
          ["trainer.parallelism={data: none, tensor: 2}"], arguments=["--world-size", "4"]),
    Fault("compilation with split dropout", ["trainer.compile", "dropout"],
          ["trainer.parallelism.tensor=2", "trainer.compile=true", "model.attn_dropout=0.1"],
          arguments=["--world-size", "2"]),
    Fault("a launcher's variables that are no ranks", ["RANK=4 and WORLD_SIZE=4"],
          environ={"RANK": "4", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}),
    Fault("the launcher's ranks", ["tensor 3 on 4 ranks"], ["trainer.parallelism.tensor=3"],
          environ={"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4",
                   "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}),
    Fault("the ranks of a job", ["tensor 3 on 4 ranks"],
          ["slurm={cluster: slurm, walltime: 1h, nodes: 2, ranks_per_node: 2}", "trainer.parallelism.tensor=3"]),
    Fault("a site that there is not", ["derecho"], ["pbs={cluster: derech, walltime: 1h}"]),
    Fault("a site without what it asks for", ["pbs.account"], ["pbs={cluster: derecho, walltime: 1h}"]),
    Fault("a template that is not there", ["slurm.template"],
          ["slurm={cluster: slurm, walltime: 1h, template: none.j2}"]),
]  # fmt: skip

FOLDERS = [
    Fault("a folder that cannot be made", ["save_loc", "cannot be written"], ["save_loc=config.yml/run"]),
    Fault("checkpoints that would be lost", ["trainer.resume: never"], ["trainer.resume=never"], needs="run"),
    Fault("a beginning that is not there", ["/nowhere/step_00000001", "no such checkpoint"],
          ["trainer.resume=/nowhere/step_00000001"]),
    Fault("a checkpoint older than others", ["trainer.resume", "older"],
          ["trainer.resume=run/checkpoints/step_00000001"], needs="run"),
    Fault("a checkpoint of another model", ["step_00000002", "model.dim"],
          ["model.dim=[16, 32, 64, 128]"], needs="run"),
    Fault("a checkpoint of other channels", ["step_00000002", "channels that differ", "t2m"],
          ["data.variables.prognostic={vars_3D: [t]}"], needs="run"),
    Fault("a checkpoint of another training period", ["step_00000002", "data.splits.train"],
          ["data.splits.train=['2000-01-01', '2000-01-03']"], needs="run"),
    Fault("a checkpoint of another step", ["step_00000002", "data.timestep: 6h in the checkpoint, 12h in the config"],
          ["data.timestep=12h", "inference={lead_time: 12h, initial_times: {every: 12h}}"], needs="run"),
    Fault("a checkpoint of another grid", ["grid that differs", "step_00000002"], needs="run", spoil=lambda folder: [
          write_file(folder / f"data_{file}.nc", {n: v[..., ::2] for n, v in make_fields(seed=10 * file).items()},
                     hours_of_file(file), levels=[500, 850]) for file in (1, 2)]),
    Fault("a checkpoint of other units", ["step_00000002", "degC"], needs="run", spoil=rewrite_both_files(
          make_t2m_in_celsius, attributes={"t2m": {"units": "degC"}})),
    Fault("a checkpoint of another global batch", ["2 samples per step", "cannot be divided equally among 3 ranks"],
          ["trainer.parallelism.replicate=3"], needs="run"),
    Fault("a damaged newest checkpoint", ["step_00000002", "checksum", "start from", "step_00000001"], needs="run",
          spoil=damage_checkpoints(-1)),
    Fault("an unfinished newest checkpoint", ["step_00000002", "manifest.json"], needs="run",
          spoil=remove_last_manifest),
    Fault("only damaged checkpoints", ["every checkpoint is damaged, 2 in total", "trainer.resume: never"], needs="run",
          spoil=damage_checkpoints(0, 1)),
]  # fmt: skip

TIMES = [
    Fault("less time than the steps take", ["trainer.walltime", "0.1 samples/s", "slurm.chain: 2"],
          ["trainer.walltime=1h", "trainer.max_steps=200"], spoil=write_slow_metrics),
    Fault("a chain that is too short", ["slurm.walltime: 1h and 3 jobs", "slurm.chain: 12"],
          spoil=write_slow_metrics, overrides=[
          "slurm={cluster: slurm, walltime: 1h, chain: 3, ranks_per_node: 1}", "trainer.max_steps=2000"]),
    Fault("a minute", ["trainer.walltime: 1min"], ["trainer.walltime=1min"]),
    Fault("a run that outlasts its job", ["trainer.walltime: 6h", "slurm.walltime 4h"],
          ["trainer.walltime=6h", "slurm={cluster: slurm, walltime: 4h, ranks_per_node: 1}"]),
]  # fmt: skip

FAULTS = [*KEYS, *FILES, *SPLITTING, *FORECASTS, *STORES, *MODELS, *TRAINING, *RANKS, *FOLDERS, *TIMES]


def patch_environment(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Introduce the parts of a fault that are not files: environment variables, disk space, missing modules."""
    for name, value in fault.environ.items():
        monkeypatch.setenv(name, value)
    if fault.free is not None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: build_disk_usage(fault.free))
    if fault.absent:
        monkeypatch.setitem(sys.modules, fault.absent, None)
