"""Rows of the keys under ``trainer`` and ``loss``."""

from __future__ import annotations

from credit.interop.miles_credit.keys.row import KeyRow, derived_rows, ignored_rows, mapped_rows, refused_rows

_OTHER_TRAINER = "a key of a trainer without a counterpart; see `trainer.type`"
_SPECTRAL = (
    "this loss has no counterpart; a similar loss is `loss.kind: amse`, which compares power by total wavenumber"
)

_TRAINER: list[KeyRow] = [
    *derived_rows("12", "trainer.type", "there is only one trainer"),
    *mapped_rows("12", "trainer.mode", "`trainer.parallelism.data`"),
    *mapped_rows("1", "trainer.domain_parallel_size", "`trainer.parallelism.domain`"),
    *mapped_rows(
        "12",
        "trainer.parallelism.data trainer.parallelism.tensor trainer.parallelism.domain",
        "the same key",
    ),
    *mapped_rows("12", "trainer.cpu_offload", "`trainer.parallelism.cpu_offload`"),
    *mapped_rows("12", "trainer.activation_checkpoint", "`trainer.activation_checkpoint`"),
    *ignored_rows("12", "trainer.checkpoint_all_layers", "blocks are checkpointed, which does not change values"),
    *mapped_rows("12", "trainer.compile", "`trainer.compile`"),
    *mapped_rows("12", "trainer.amp", "`trainer.amp`, in bfloat16"),
    *refused_rows(
        "12",
        "trainer.mixed_precision.param_dtype trainer.mixed_precision.reduce_dtype trainer.mixed_precision.buffer_dtype",
        "set `trainer.amp` and `trainer.fsdp2_mp_policy`",
        harmless_values=(None, "float32"),
    ),
    *mapped_rows("12", "trainer.epochs", "`trainer.num_epoch`, or `trainer.max_steps` with `batches_per_epoch`"),
    *mapped_rows(
        "12",
        "trainer.batches_per_epoch",
        "`trainer.max_steps`, `trainer.validate_every`, `trainer.checkpoint_every`; 0 means the whole period",
    ),
    *ignored_rows("12", "trainer.num_epoch", "epochs per job; `pbs.chain` or `slurm.chain` divides a run into jobs"),
    *ignored_rows("12", "trainer.start_epoch trainer.reload_epoch",
                  "`trainer.resume: auto` continues from the last step"),
    *refused_rows("12", "trainer.train_one_epoch", "a run without an end; set `trainer.epochs`",
                  harmless_values=(None, False)),
    *ignored_rows("12", "trainer.stop_after_epoch", "`trainer.walltime` ends a job"),
    *mapped_rows("12", "trainer.train_batch_size trainer.valid_batch_size trainer.grad_accum_every", "the same key"),
    *mapped_rows("12", "trainer.valid_batches_per_epoch",
                 "`trainer.valid_samples`; 0 means the default of this package"),
    *ignored_rows("12", "trainer.skip_validation", "every run validates, because validation selects the best weights"),
    *mapped_rows("12", "trainer.learning_rate trainer.weight_decay", "the same key"),
    *mapped_rows("12", "trainer.use_scheduler trainer.scheduler.scheduler_type", "`trainer.schedule.kind`"),
    *derived_rows(
        "12",
        "trainer.scheduler.T_max trainer.scheduler.first_cycle_steps trainer.scheduler.total_steps "
        "trainer.scheduler.cycle_mult trainer.scheduler.gamma trainer.scheduler.warmup_steps "
        "trainer.scheduler.min_lr trainer.scheduler.max_lr trainer.scheduler.eta_min",
        "`trainer.schedule.warmup` (a fraction of the run), `trainer.schedule.final` (a fraction of the peak), "
        "`trainer.learning_rate`",
    ),
    *ignored_rows("12", "trainer.scheduler.last_epoch", "the position in the schedule is part of a checkpoint"),
    *ignored_rows("12", "trainer.update_learning_rate",
                  "`trainer.schedule` always sets the rate, even after a restart"),
    *mapped_rows("12", "trainer.grad_max_norm", "`trainer.grad_max_norm`; null for `dynamic` and 0"),
    *mapped_rows("12", "trainer.use_ema trainer.ema_decay", "the same key"),
    *mapped_rows("12", "trainer.use_tensorboard", "`trainer.loggers: [tensorboard]`"),
    *mapped_rows("12", "trainer.stopping_patience", "`trainer.patience`, unless it exceeds the number of epochs"),
    *mapped_rows("12", "trainer.backprop_on_timestep", "`trainer.backprop_on_timestep`"),
    *derived_rows("12", "trainer.load_weights", "import weights with `credit convert --weights`"),
    *ignored_rows(
        "12",
        "trainer.load_optimizer trainer.load_scaler trainer.load_scheduler trainer.load_sheduler",
        "`trainer.resume: auto` continues with the whole state; states of miles-credit are not imported",
    ),
    *ignored_rows(
        "12",
        "trainer.save_backup_weights trainer.save_best_weights trainer.save_every_epoch",
        "`trainer.keep_last`, `keep_best` and `keep_every` select the checkpoints",
    ),
    *ignored_rows("12", "trainer.save_metric_vars", "`metrics.jsonl` contains the metrics of every variable"),
    *derived_rows("12", "trainer.thread_workers", "`data.num_workers`"),
    *ignored_rows("12", "trainer.valid_thread_workers trainer.prefetch_factor trainer.dataloader_timeout_s",
                  "the key does not change the samples"),
    *mapped_rows("12", "trainer.ensemble_size", "`trainer.members`, with `loss.kind: crps` and `model.noise`"),
    *ignored_rows("12", "trainer.training_metric trainer.training_metric_direction",
                  "`trainer.monitor` has different names of metrics"),
    *ignored_rows("12", "trainer.skip_nan_prune", "handling of failed trials in a search of parameters"),
    *ignored_rows(
        "1",
        "trainer.starting_window_size trainer.window_size trainer.stop_rollout trainer.teacher_forcing_ratio "
        "trainer.long_rollout trainer.batch_iterations",
        "only the trainers `era5` and `ic-opt` read this key; see `trainer.type`",
    ),
    *refused_rows("12", "trainer.apply_grad_penalty", _OTHER_TRAINER, harmless_values=(None, False)),
    *refused_rows("1", "trainer.save_data.*", _OTHER_TRAINER),
]  # fmt: skip

_LOSS: list[KeyRow] = [
    *mapped_rows("12", "loss.training_loss", "`loss.kind`"),
    *ignored_rows("12", "loss.validation_loss loss.validation_loss_parameters.*",
                  "validation computes scores; `trainer.monitor` selects the best weights"),
    *mapped_rows("12", "loss.training_loss_parameters.delta", "`loss.huber_delta`"),
    *mapped_rows("12", "loss.training_loss_parameters.alpha loss.training_loss_parameters.biased", "`loss.alpha`"),
    *ignored_rows(
        "12",
        "loss.training_loss_parameters.reduction loss.training_loss_parameters.no_autocast",
        "the key does not change the value of the loss",
    ),
    *mapped_rows("12", "loss.use_latitude_weights", "`loss.latitude_weights`"),
    *ignored_rows("12", "loss.latitude_weights", "a file; areas are derived from the coordinates of the data"),
    *mapped_rows("12", "loss.use_variable_weights", "`loss.weights`"),
    *mapped_rows("12", "loss.variable_weights.VARIABLE", "`loss.weights`"),
    *ignored_rows("12", "loss.VARIABLE", "miles-credit does not read a weight outside `loss.variable_weights`"),
    *refused_rows("12", "loss.use_power_loss loss.use_spectral_loss", _SPECTRAL, harmless_values=(None, False)),
    *ignored_rows("12", "loss.spectral_lambda_reg loss.spectral_wavenum_init", "used only by the spectral losses"),
    *refused_rows("12", "loss.use_vgg", "a loss on images has no counterpart", harmless_values=(None, False)),
    *derived_rows("2", "loss.type", "`loss.kind` of `loss.args.training_loss`; the type must be `base`"),
    *mapped_rows("2", "loss.args.training_loss", "`loss.kind`"),
    *mapped_rows("2", "loss.args.base_loss_parameters.delta", "`loss.huber_delta`"),
    *refused_rows("2", "loss.args.base_loss_overrides.*", "each variable has the same loss",
                  harmless_values=(None, {})),
    *mapped_rows("2", "loss.args.use_latitude_weights", "`loss.latitude_weights`"),
    *ignored_rows("2", "loss.args.latitude_weights", "a file; areas are derived from the coordinates of the data"),
    *mapped_rows("2", "loss.args.var_weighting", "`loss.scaling: state`, which has the meaning of `inverse_variance`"),
    *ignored_rows("2", "loss.args.scaler_path", "the statistics of the training store weight the variables"),
    *refused_rows("2", "loss.args.variable_weights.*", "set `loss.weights` yourself, with names of channels"),
    *ignored_rows("2", "loss.args.reduction", "the loss of this package is always a weighted mean"),
    *ignored_rows("2", "loss.args.normalize_weights", "a constant factor of the whole loss"),
    *ignored_rows(
        "2",
        "loss.args.include_computed_diagnostics",
        "the loss uses only the outputs of the network; `inference.derive` writes computed fields",
    ),
]  # fmt: skip

ROWS: tuple[KeyRow, ...] = (*_TRAINER, *_LOSS)
