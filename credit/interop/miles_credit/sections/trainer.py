"""Conversion of the ``trainer`` section."""

from __future__ import annotations

import math

from credit.interop.miles_credit.draft import ConfigDraft
from credit.interop.miles_credit.reading import MilesConfig, to_number

# Hidden defaults of keys whose default depends on the generation.
_AMP = {1: False, 2: True}
_ACTIVATION_CHECKPOINT = {1: True, 2: False}
_PATIENCE = {1: 999, 2: 100}
# `trainer.mode` -> `trainer.parallelism.data`; None if the key is not written.
_MODES = {"none": None, "ddp": "ddp", "fsdp": "fsdp2", "domain_parallel": None, "fsdp+domain_parallel": "fsdp2"}
# Trainers that train in the same way as this package.
_SUPPORTED_TRAINERS = {
    "standard", "multi-step", "era5", "era5-gen1", "gen2", "era5-v2", "era5-gen2", "universal", "cam",
}  # fmt: skip
# Learning rate for a file without a learning rate, which miles-credit rejects.
_FIRST_LEARNING_RATE = 1e-3
# Longest allowed warm-up, as a fraction of the run.
_LONGEST_WARMUP = 0.5


def convert_trainer(config: MilesConfig, draft: ConfigDraft) -> None:
    """Write the ``trainer`` section, including those defaults of miles-credit that this package does not share."""
    report = config.report
    trainer_type = str(config.get("trainer.type", "gen2"))
    if trainer_type not in _SUPPORTED_TRAINERS:
        report.record_refused("trainer.type", f"`{trainer_type}`: this kind of training has no counterpart")
    num_steps = _convert_run_length(config, draft)
    for name, default in (("train_batch_size", 1), ("valid_batch_size", 1), ("grad_accum_every", 1)):
        draft.set(f"trainer.{name}", config.get_integer(f"trainer.{name}", default))
    _convert_schedule(config, draft, num_steps)
    draft.set("trainer.weight_decay", config.get_number("trainer.weight_decay", 0.0))
    _convert_clipping(config, draft)

    # By default, this package averages the weights, but miles-credit does not.
    draft.set("trainer.use_ema", config.get_flag("trainer.use_ema", False))
    if draft.values["trainer"]["use_ema"]:
        draft.set("trainer.ema_decay", config.get_number("trainer.ema_decay", 0.9999))
    for name, default in (
        ("amp", _AMP[config.generation]),
        ("activation_checkpoint", _ACTIVATION_CHECKPOINT[config.generation]),
        ("compile", False),
    ):
        draft.set(f"trainer.{name}", config.get_flag(f"trainer.{name}", default))
        if not config.has(f"trainer.{name}") and name != "compile":
            report.record_derived(f"trainer.{name}", f"hidden default `{default}`".lower())
    if config.get_flag("trainer.use_tensorboard", False):
        draft.set("trainer.loggers", ["tensorboard"])
    # The patience of miles-credit is a number of epochs. Both packages validate at the end of each epoch.
    patience = config.get_integer("trainer.stopping_patience", _PATIENCE[config.generation])
    if patience < config.get_integer("trainer.epochs", 1):
        draft.set("trainer.patience", patience)
    steps = config.get("trainer.backprop_on_timestep", config.get("data.backprop_on_timestep"))
    if steps:
        forecast_len = draft.values["data"]["forecast_len"]
        numbers = [to_number(step) for step in steps] if isinstance(steps, list) else [None]
        if None in numbers:
            report.record_refused("trainer.backprop_on_timestep", f"`{steps}` is not a list of steps")
        else:
            # Steps after the end of the rollout have no loss in miles-credit.
            draft.set("trainer.backprop_on_timestep", [int(step) for step in numbers if 1 <= step <= forecast_len])
    if config.get_flag("trainer.load_weights", False):
        report.record_derived(
            "trainer.load_weights", "the run starts from existing weights: import them with `credit convert --weights`"
        )
    workers = config.get_integer("trainer.thread_workers", 4)
    draft.set("data.num_workers", workers)
    _convert_parallelism(config, draft)


def _convert_run_length(config: MilesConfig, draft: ConfigDraft) -> int | None:
    """Write the length of the training run and the interval between validations.

    Returns:
        Length of the run in optimizer steps; None if the length is given in epochs, because it then depends on the
        data.
    """
    epochs = config.get_integer("trainer.epochs", 1)
    batches = config.get_integer("trainer.batches_per_epoch", 0)
    accumulation = max(config.get_integer("trainer.grad_accum_every", 1), 1)
    valid_batches = config.get_integer("trainer.valid_batches_per_epoch", 0)
    if valid_batches > 0:
        draft.set("trainer.valid_samples", valid_batches * max(config.get_integer("trainer.valid_batch_size", 1), 1))
    if batches <= 0:
        draft.set("trainer.num_epoch", epochs)
        return None
    # The last batches of an epoch form an optimizer step, even if there are fewer than `grad_accum_every`.
    steps_per_epoch = math.ceil(batches / accumulation)
    num_steps = epochs * steps_per_epoch
    draft.set("trainer.max_steps", num_steps, f"{epochs} epochs of {batches} batches")
    draft.set("trainer.validate_every", min(steps_per_epoch, num_steps))
    draft.set("trainer.checkpoint_every", min(steps_per_epoch, num_steps))
    config.report.record_derived(
        "trainer.batches_per_epoch", f"`trainer.max_steps: {num_steps}`, validation once per epoch"
    )
    return num_steps


def _convert_schedule(config: MilesConfig, draft: ConfigDraft, num_steps: int | None) -> None:
    """Write the learning rate and its schedule.

    Args:
        config: config to convert.
        draft: draft to which keys are added.
        num_steps: length of the run in optimizer steps; None if the length is given in epochs.
    """
    key = "trainer.scheduler.scheduler_type"
    rate = config.get_number("trainer.learning_rate", _FIRST_LEARNING_RATE)
    # Generation 1 uses a scheduler only if this key is set; generation 2 uses it by default.
    uses_scheduler = config.get_flag("trainer.use_scheduler", config.generation == 2)
    kind = config.get(key)
    if not uses_scheduler or kind is None:
        draft.set("trainer.learning_rate", rate)
        draft.set("trainer.schedule", {"kind": "constant", "warmup": 0.0})
        return
    if str(kind) not in _SCHEDULES:
        choices = ", ".join(_SCHEDULES)
        config.report.record_refused(key, f"`{kind}` has no counterpart; supported schedules are {choices}")
        return
    rate, warmup, lowest_rate = _SCHEDULES[str(kind)](config, rate, num_steps)
    if rate <= 0:
        config.report.record_refused(
            "trainer.learning_rate", f"`{rate}`: this rate, or `max_lr` of the scheduler, must be > 0"
        )
        return
    draft.set("trainer.learning_rate", rate)
    if warmup > _LONGEST_WARMUP:
        # A warm-up of the whole run is not allowed.
        warmup = _LONGEST_WARMUP
        config.report.record_derived(
            "trainer.scheduler.warmup_steps", "approximate: the warm-up is shortened to half of the run"
        )
    final = min(lowest_rate / rate, 1.0)
    draft.set("trainer.schedule", {"kind": "cosine", "warmup": round(warmup, 6), "final": round(final, 6)})
    draft.comments["trainer.schedule"] = f"from `{kind}`; warmup is a fraction of the run, final of the peak"


def _read_linear_warmup_cosine(config: MilesConfig, rate: float, num_steps: int | None) -> tuple[float, float, float]:
    """Return (peak rate, warm-up as a fraction of the run, lowest rate) of the schedule ``linear-warmup-cosine``."""
    warmup_steps = config.get_number("trainer.scheduler.warmup_steps", 1000)
    # If the length of the run depends on the data, the length of the schedule is used instead.
    total_steps = config.get_number("trainer.scheduler.total_steps", 500_000)
    lowest_rate = config.get_number("trainer.scheduler.min_lr", 1e-5)
    config.report.record_derived(
        "trainer.scheduler.scheduler_type", "a cosine over the whole run; in miles-credit, it ends after `total_steps`"
    )
    return rate, warmup_steps / max(num_steps or total_steps, 1), lowest_rate


def _read_cosine_annealing(config: MilesConfig, rate: float, num_steps: int | None) -> tuple[float, float, float]:
    """Return (peak rate, warm-up, lowest rate) of the schedule ``cosine-annealing``, whose length is in epochs."""
    if config.get_integer("trainer.scheduler.T_max", 1) != config.get_integer("trainer.epochs", 1):
        config.report.record_derived(
            "trainer.scheduler.T_max", "approximate: the cosine ends with the run, not after `T_max`"
        )
    return rate, 0.0, config.get_number("trainer.scheduler.eta_min", 0.0)


def _read_cosine_restarts(config: MilesConfig, rate: float, num_steps: int | None) -> tuple[float, float, float]:
    """Return (peak rate, warm-up, lowest rate) of the schedule ``cosine-annealing-restarts``, without restarts.

    The peak rate is `max_lr` of the schedule, not `trainer.learning_rate`.
    """
    first_cycle = config.get_number("trainer.scheduler.first_cycle_steps", 1)
    warmup_steps = config.get_number("trainer.scheduler.warmup_steps", 0)
    config.report.record_derived(
        "trainer.scheduler.scheduler_type", "approximate: one warm-up and one cosine over the run, without restarts"
    )
    peak_rate = config.get_number("trainer.scheduler.max_lr", 0.1)
    return (
        peak_rate,
        warmup_steps / max(num_steps or first_cycle, 1),
        config.get_number("trainer.scheduler.min_lr", 0.001),
    )


def _read_lambda(config: MilesConfig, rate: float, num_steps: int | None) -> tuple[float, float, float]:
    """Return (peak rate, warm-up, lowest rate) of the schedule ``lambda``, with a warm-up of 10 of 100 epochs."""
    config.report.record_derived(
        "trainer.scheduler.scheduler_type", "approximate: a warm-up over a tenth of the run, then a cosine to 0"
    )
    return rate, 0.1, 0.0


# `trainer.scheduler.scheduler_type` -> function that returns peak rate, warm-up as a fraction of the run, lowest rate.
_SCHEDULES = {
    "linear-warmup-cosine": _read_linear_warmup_cosine,
    "cosine-annealing": _read_cosine_annealing,
    "cosine-annealing-restarts": _read_cosine_restarts,
    "lambda": _read_lambda,
}


def _convert_clipping(config: MilesConfig, draft: ConfigDraft) -> None:
    """Write `trainer.grad_max_norm`; 0 and null mean that gradients are not clipped."""
    value = config.get("trainer.grad_max_norm", 0)
    if value == "dynamic":
        draft.set("trainer.grad_max_norm", None)
        text = "null, because `dynamic` clips at the norm itself, which changes nothing"
        if config.generation == 1:
            text = "approximate: null; generation 1 reduces a norm above 1 to its square root"
        config.report.record_derived("trainer.grad_max_norm", text)
        return
    norm = 0.0
    if value is not None:
        norm = config.get_number("trainer.grad_max_norm", 0.0)
    draft.set("trainer.grad_max_norm", norm if norm > 0 else None)


def _convert_parallelism(config: MilesConfig, draft: ConfigDraft) -> None:
    """Write the keys of `trainer.parallelism`; a run on a single process needs none of these keys."""
    report = config.report
    mode = str(config.get("trainer.mode", "none"))
    data_parallelism = _MODES.get(mode)
    if mode not in _MODES:
        report.record_refused("trainer.mode", f"`{mode}` is not one of {', '.join(_MODES)}")
    # Generation 1 has a single mode. Generation 2 has a degree for each axis of the mesh.
    degrees = {"domain": config.get_integer("trainer.domain_parallel_size", 1), "tensor": 1}
    if "domain" not in mode:
        degrees["domain"] = 1
    if config.peek_section("trainer.parallelism"):
        value = str(config.get("trainer.parallelism.data", "none"))
        data_parallelism = None if value == "none" else value
        if value not in ("none", "ddp", "fsdp2"):
            report.record_refused("trainer.parallelism.data", f"`{value}` is not one of none, ddp, fsdp2")
        for name in degrees:
            degrees[name] = config.get_integer(f"trainer.parallelism.{name}", 1)
    if data_parallelism is not None:
        draft.set("trainer.parallelism.data", data_parallelism)
    for name, degree in degrees.items():
        if degree > 1:
            draft.set(f"trainer.parallelism.{name}", degree)
    if config.get_flag("trainer.cpu_offload", False):
        draft.set("trainer.parallelism.cpu_offload", True)
