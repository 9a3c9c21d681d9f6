"""The part of ``credit_check`` that looks at the run's folder, its checkpoints, its ranks, its room and its time."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from statistics import median

from credit.calendar import format_duration, parse_duration
from credit.cli.check.data import DataSummary
from credit.cli.check.report import CheckReport
from credit.config import Config
from credit.data.climatology.fit import plan_fit
from credit.data.climatology.stored import bytes_of, difference
from credit.data.samples.loader import ResumableSampler
from credit.data.sources.source_reader import SourceReader
from credit.data.splits import require_no_leakage
from credit.data.store.preprocess import bytes_needed, times_within
from credit.errors import ConfigError
from credit.hpc.cluster import load_cluster
from credit.hpc.job import Job, build_job
from credit.hpc.script import render
from credit.models.lora import base_state_dict, checkpoint_state_dict
from credit.parallel.mesh import DeviceGrid, ParallelDims, plan_degrees
from credit.parallel.process_info import read_process_info
from credit.train.assets import ModelAssets
from credit.train.checkpoint import checkpoint
from credit.train.checkpoint.external_weights import assets_for_weights, read_state_file
from credit.train.checkpoint.resume import find_checkpoint, find_initial_weights, load_run_state, require_same_run
from credit.train.dry_run import DryRunResult, dummy_assets
from credit.train.fine_tuning import find_base
from credit.train.monitor.run_files import read_last_metrics, read_status
from credit.train.optim import forecast_len_at

# of metrics.jsonl's last rows, so many tell the speed
_SPEED_ROWS = 200
# a run stops so long before its end, to save
_MARGIN_MINUTES = 1
# of a variable: so much netCDF keeps unpacked between two reads by itself
_KEPT_UNPACKED = 2**24


def check_folder(config: Config, findings: CheckReport) -> None:
    """Try to write where the run and its forecasts will be written."""
    forecasts, tried = Path(config.save_loc) / config.inference.folder, []
    for key, name in {"save_loc": config.save_loc, "inference.folder": forecasts}.items():
        folder = Path(name).absolute()
        while not folder.exists():
            folder = folder.parent
        if folder in tried:
            continue
        tried.append(folder)
        try:
            with tempfile.TemporaryFile(dir=folder):
                findings.say(f"{key}: {name} can be written")
        except OSError as error:
            findings.add(f"{key}: {name}: {folder} cannot be written ({error.strerror}); choose another folder")
    status = read_status(Path(config.save_loc))
    if status.get("status") == "failed":
        findings.say(f"save_loc: the run there failed at step {status.get('step')}: {status.get('reason')}")


def render_job(config: Config, findings: CheckReport) -> Job | None:
    """Write, for nobody, the script of the site that the config names; None where it names none."""
    named = [section for section in (config.pbs, config.slurm) if section.cluster is not None]
    if len(named) != 1:
        return None
    job, section = None, named[0]
    with findings.collect():
        cluster = load_cluster(section.cluster)
        other = config.pbs if cluster.scheduler == "pbs" else config.slurm
        if other is not section:
            raise ConfigError(
                f"{'slurm' if other is config.pbs else 'pbs'}.cluster: {section.cluster}: {cluster.title} has "
                f"{cluster.scheduler}; use that section"
            )
        folder = Path(config.save_loc)
        job = build_job(
            "train", cluster, section, experiment=config.experiment, folder=folder, config=folder / "config.yml"
        )
        render(job)
    return job


def plan_ranks(config: Config, world_size: int | None, job: Job | None, findings: CheckReport) -> ParallelDims:
    """Return the mesh of `world_size` ranks; by default the launcher's, the job's, or the least that the config allows.

    Args:
        config: of the run.
        world_size: number of ranks, None for the default.
        job: of the site that the config names.
        findings: receives what the run itself would say of a mesh that does not fit.
    """
    conf = config.trainer.parallelism
    least = conf.tensor * (conf.replicate if conf.data == "fsdp2" else 1)
    degrees = ParallelDims()
    with findings.collect():
        launch = read_process_info()
        launched = launch.world if launch.launcher != "none" else None
        world = world_size or launched or (job.ranks if job is not None else least)
        degrees = plan_degrees(conf, world)
        findings.say(f"ranks: {DeviceGrid(degrees).describe()} (--world-size N checks another number)")
    return degrees


def check_resume(
    config: Config, found: DataSummary | None, tried: DryRunResult | None, degrees: ParallelDims, findings: CheckReport
) -> tuple[Config, int]:
    """Look whether the run could go on from the checkpoints that it would find.

    Returns:
        The config as the run would have it, which keeps a checkpoint's global batch, and the step that it begins with.
    """
    folder = Path(config.save_loc)
    step = 0
    with findings.collect():
        origin = find_checkpoint(config, folder)
        _name_damaged(folder / "checkpoints", origin, config.trainer.resume == "never", findings)
        base = find_base(config, origin)
        weights = find_initial_weights(config, origin)
        if weights is not None and found is not None:
            assets = dummy_assets(config, found.grid, found.attributes, found.masks)
            _require_unseen(config, found, assets_for_weights(config, assets, found, weights), weights, findings)
        if weights is not None and tried is not None:
            shapes = {name: value.shape for name, value in read_state_file(weights).items()}
            checkpoint.require_same_tensors(tried.model.state_dict(), shapes, weights)
            findings.say(f"weights: the run begins with those in {weights}")
        if origin is None:
            return config, 0
        meta = checkpoint.load_meta(origin)
        goes_on = base is None or origin.resolve() != base
        step = meta["step"] if goes_on else 0
        if found is None:
            require_same_run(config, meta["config"], origin)
            return config, step
        config, assets = load_run_state(config, found, DeviceGrid(degrees), origin, goes_on)
        _require_unseen(config, found, assets, origin, findings)
        if tried is not None:
            own = checkpoint_state_dict(tried.model) if goes_on else base_state_dict(tried.model)
            checkpoint.require_same_tensors(
                own, checkpoint.stored_shapes(origin, "model" if goes_on else "forecast"), origin
            )
        findings.say(f"checkpoint: the run begins with {origin}, step {step}")
    return config, step


def _require_unseen(config: Config, found: DataSummary, assets: ModelAssets, path: Path, findings: CheckReport) -> None:
    """Name a test period that the weights in `path` have seen a part of."""
    if "test" in found.splits and not config.verification.allow_seen:
        with findings.collect():
            require_no_leakage(found.splits["test"], assets.seen, str(path), found.clock)


def _name_damaged(folder: Path, origin: Path | None, begins_anew: bool, findings: CheckReport) -> None:
    """Name the run's own checkpoints that would be passed over; of a run that begins anew, those that it renames."""
    own = origin is not None and origin.resolve().parent == folder.resolve()
    for path in checkpoint.list_checkpoints(folder):
        if own and checkpoint.step_of(path) <= checkpoint.step_of(origin):
            continue
        if begins_anew:
            findings.say(
                f"checkpoint: {path} is damaged; with trainer.resume: never it is renamed, and training begins anew"
            )
            continue
        findings.add(
            f"{path}: {checkpoint.verify_checkpoint(path)}; training would pass over it and "
            f"{f'begin with {origin}' if origin is not None else 'begin anew'}; remove it, or copy it again"
        )


def check_run_length(
    config: Config, found: DataSummary, degrees: ParallelDims, findings: CheckReport
) -> tuple[int, int]:
    """Return the optimizer steps of the whole run and the samples of each; zeros where a step has too many samples."""
    conf, steps, samples = config.trainer, 0, 0
    with findings.collect():
        ranks = DeviceGrid(degrees).data_ranks
        sampler = ResumableSampler(
            len(found.samples["train"]), conf.train_batch_size, conf.grad_accum_every, config.seed, 0, 0,
            data_ranks=ranks,
        )  # fmt: skip
        samples = sampler.block
        steps = conf.max_steps or conf.num_epoch * sampler.steps_per_epoch
        findings.say(f"training: {steps} steps of {samples} samples; an epoch has {sampler.steps_per_epoch}")
        ramp = conf.forecast_len_from
        if forecast_len_at(steps - 1, steps, config.data.forecast_len, ramp) != config.data.forecast_len:
            raise ConfigError(
                f"trainer.forecast_len_from: {ramp}: the last share begins after the last of {steps} steps, so no step "
                f"would train on data.forecast_len {config.data.forecast_len}; begin it earlier"
            )
    return steps, samples


def check_walltime(config: Config, job: Job | None, left: int, samples: int, findings: CheckReport) -> None:
    """Compare the steps that are left with the job's time, where an earlier part of the run has shown its speed.

    Args:
        config: of the run.
        job: of the site that the config names.
        left: optimizer steps.
        samples: of each.
        findings: receives what was found.
    """
    own = None if config.trainer.walltime is None else parse_duration(config.trainer.walltime)
    asked = None if job is None else job.seconds // 60
    scheduler = "slurm" if job is None else job.scheduler
    if own is not None and asked is not None and own > asked:
        findings.add(
            f"trainer.walltime: {config.trainer.walltime} exceeds {scheduler}.walltime {format_duration(asked)}, "
            "after which the scheduler ends the job; leave it out, as the job's script tells the run when its job ends"
        )
    ends = [(minutes, key) for minutes, key in ((own, "trainer"), (asked, scheduler)) if minutes is not None]
    if left <= 0:
        findings.say("training: nothing is left; trainer.max_steps or num_epoch would have to be more")
    if left <= 0 or not ends:
        return
    minutes, key = min(ends)
    walltime = f"{key}.walltime: {format_duration(minutes)}"
    if minutes <= _MARGIN_MINUTES:
        findings.add(f"{walltime}: a run stops a minute before its end, to save; give it more")
        return
    rows = read_last_metrics(Path(config.save_loc))[-_SPEED_ROWS:]
    speeds = [row["samples_per_s"] for row in rows if row.get("samples_per_s")]
    if not speeds:
        return
    hours = left * samples / median(speeds) / 3600
    jobs = math.ceil(hours * 60 / (minutes - _MARGIN_MINUTES))
    links = max(config.pbs.chain or 1, config.slurm.chain or 1, job.links if job is not None else 1)
    text = f"{left} steps take about {hours:.1f} h at {median(speeds):.3g} samples/s (metrics.jsonl)"
    findings.say(f"time: {text}")
    if jobs > links:
        findings.add(
            f"{walltime} and {links} job{'s' if links > 1 else ''} are too little: {text}, which is {jobs} jobs; set "
            f"{scheduler}.chain: {jobs} (a check does not see the --chain of credit submit), take more time or more "
            "ranks, or train fewer steps"
        )


def check_disk_space(
    config: Config,
    found: DataSummary,
    tried: DryRunResult | None,
    forecast_bytes: int,
    steps: int,
    findings: CheckReport,
) -> None:
    """Compare what the run will write with what is free, disk by disk.

    Args:
        config: of the run.
        found: the data.
        tried: the network, None where it cannot be built.
        forecast_bytes: of all forecasts.
        steps: optimizer steps of the run, 0 where that is not known.
        findings: receives what was found.
    """
    conf, folder = config.trainer, Path(config.save_loc)
    forecasts, store = folder / config.inference.folder, _store_bytes(config, found)
    needs = [("forecasts", forecasts, max(0, forecast_bytes - _bytes_below(forecasts)))]
    if store:
        needs.append(("data.store", Path(config.data.store), store))
        task = "finished or mended" if Path(config.data.store).exists() else "written"
        findings.say(f"store: {config.data.store} is to be {task} (credit_preprocess), at most {store / 2**30:.2f} GiB")
    _say_chunks(config, found, findings)
    climatology = _climatology_bytes(config, found, findings)
    if climatology:
        needs.append(("climatology", Path(config.data.store), climatology))
    if tried is not None:
        milestones = steps // conf.keep_every if conf.keep_every else 0
        # one more is written before the oldest goes
        most, size = min(conf.keep_last + conf.keep_best + milestones + 1, max(steps, 1)), tried.checkpoint_bytes
        left = max(0, most * size - _bytes_below(folder / "checkpoints"))
        needs.append(("checkpoints", folder, left))
        findings.say(
            f"checkpoints: at most {most} of {size / 2**20:.1f} MiB (trainer.keep_last, keep_best, keep_every)"
        )
    disks: dict[int, list[tuple[str, Path, int]]] = {}
    for item in needs:
        disks.setdefault(_existing(item[1]).stat().st_dev, []).append(item)
    for items in disks.values():
        where, need = _existing(items[0][1]), sum(size for _, _, size in items)
        free = shutil.disk_usage(where).free
        parts = ", ".join(f"{what} {size / 2**30:.2f}" for what, _, size in items)
        text = f"up to {need / 2**30:.2f} GiB more are needed ({parts}), {free / 2**30:.2f} GiB are free"
        findings.say(f"disk of {where}: {text}")
        if need > free:
            findings.add(
                f"save_loc, data.store: on the disk of {where} {text}; make room, choose another place, keep fewer "
                "checkpoints (trainer.keep_last), or write fewer fields (inference.variables, output_every)"
            )


def _say_chunks(config: Config, found: DataSummary, findings: CheckReport) -> None:
    """Say what long chunks of the source files cost, where no store stands for them."""
    reader = found.reader
    cells = math.prod(found.grid.shape)
    if not isinstance(reader, SourceReader) or reader.chunk_times * 4 * cells <= _KEPT_UNPACKED:
        return
    chunk, told = reader.chunk_times, f"sources: chunks of files span up to {reader.chunk_times} times"
    if config.data.store is None:
        findings.say(
            f"{told}, and each time that training reads unpacks one whole; set data.store and run credit_preprocess"
        )
        return
    at_once = reader.times_at_once(config.preprocess.held_bytes)
    if at_once < chunk:
        findings.say(
            f"{told}; credit_preprocess reads {at_once} at once and unpacks each about {-(-chunk // at_once)} times; "
            f"preprocess.memory_gib={math.ceil(10 * chunk * reader.bytes_a_time / 2**30) / 10:g}, in each of "
            f"{config.preprocess.workers} processes, unpacks each once or twice"
        )


def _store_bytes(config: Config, found: DataSummary) -> int:
    """Return the most that the store will still take; 0 where it is complete, or the sources are not in order."""
    if config.data.store is None or not found.splits or not isinstance(found.reader, SourceReader):
        return 0
    whole = bytes_needed(found.reader, len(times_within(found.reader, found.splits)))
    return max(0, whole - _bytes_below(Path(config.data.store)))


def _climatology_bytes(config: Config, found: DataSummary, findings: CheckReport) -> int:
    """Say what the climatology takes and return the most that the store will still take for it."""
    conf, path, stored = config.verification.climatology, config.data.store, found.channels.stored
    if conf.method == "file" or "train" not in found.samples:
        return 0
    train, shape = found.splits["train"], found.grid.shape
    if path is not None and difference(Path(path), conf, train) is None:
        return 0
    try:
        fit = plan_fit(found.times, found.clock, train.first, train.last, conf)
    except ConfigError:
        return 0  # has been named
    disk, memory = bytes_of(fit, len(stored), shape)
    if config.preprocess.climatology:
        findings.say(
            f"climatology: is to be fitted (credit_preprocess), at most {disk / 2**30:.2f} GiB in the store and "
            f"{memory / 2**30:.2f} GiB of memory in each process"
        )
        return disk
    # sums and fields are all held at once
    held = 3 * disk * len(found.channels.output) / len(stored)
    findings.say(
        f"climatology: each verification fits it, in {held / 2**30:.2f} GiB of memory (preprocess.climatology)"
    )
    return 0


def _existing(path: Path) -> Path:
    """Return the nearest folder above that is there."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path


def _bytes_below(folder: Path) -> int:
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            # a run that is under way removes files
            with suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_size
    return total
