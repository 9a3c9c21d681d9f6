"""Checks of the job script, the ranks, the number of steps and the walltime."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median

from credit.calendar import format_duration, parse_duration
from credit.cli.check.data import DataSummary
from credit.cli.check.report import CheckReport
from credit.config import Config
from credit.config.batch_division import divide_global_batch
from credit.data.samples.loader import ResumableSampler
from credit.errors import ConfigError
from credit.hpc.cluster import load_cluster, require_matching_scheduler
from credit.hpc.job import Job, JobRequest, build_job
from credit.hpc.script import render_script
from credit.parallel.blocks.cuda_graphs import require_one_rank_for_cuda_graphs
from credit.parallel.elastic.spare_ranks import choose_num_ranks, count_smallest_mesh_ranks
from credit.parallel.mesh import DeviceGrid, ParallelDims, plan_degrees
from credit.parallel.process_info import read_process_info
from credit.train.monitor.run_files import read_last_metrics
from credit.train.optim import forecast_len_at

# Number of last rows of metrics.jsonl over which the median speed is computed.
_SPEED_ROWS = 200
# Minutes before the end of the walltime at which a run stops, to save a checkpoint.
_MARGIN_MINUTES = 1


def render_job(config: Config, report: CheckReport) -> Job | None:
    """Build the job script without writing it, to validate the settings of the computing centre.

    Args:
        config: config of the run.
        report: receives errors.

    Returns:
        The training job. None if the config sets none or both of ``pbs.cluster`` and ``slurm.cluster``, or if the
        settings are wrong; wrong settings are reported.
    """
    named_sections = [section for section in (config.pbs, config.slurm) if section.cluster is not None]
    if len(named_sections) != 1:
        return None
    section = named_sections[0]
    job = None
    with report.collect():
        cluster = load_cluster(section.cluster)
        require_matching_scheduler(cluster, section)
        folder = Path(config.save_loc)
        request = JobRequest("train", config.experiment, folder, config=folder / "config.yml")
        job = build_job(request, cluster, section)
        render_script(job)
    return job


def plan_ranks(config: Config, world_size: int | None, job: Job | None, report: CheckReport) -> ParallelDims:
    """Return the size of each axis of the run's mesh; all sizes are 1 if the ranks cannot form a mesh.

    Args:
        config: config of the run.
        world_size: number of ranks. If None, use the number of ranks of the launcher, otherwise of the job, otherwise
            the smallest number that the config allows.
        job: training job of the configured cluster; None if no cluster is configured.
        report: receives an error if the ranks cannot form a mesh.
    """
    parallelism = config.trainer.parallelism
    degrees = ParallelDims()
    with report.collect():
        process_info = read_process_info()
        if world_size is None:
            if process_info.launcher != "none":
                world_size = process_info.world
            elif job is not None and job.is_elastic and config.trainer.global_batch_size is not None:
                # Ranks that are not needed for the mesh are spare ranks.
                world_size = choose_num_ranks(parallelism, config.trainer.global_batch_size, job.ranks)
            elif job is not None:
                world_size = job.ranks
            else:
                world_size = count_smallest_mesh_ranks(parallelism)
        degrees = plan_degrees(parallelism, world_size)
        require_one_rank_for_cuda_graphs(config.trainer, degrees.world)
        report.add_note(f"ranks: {DeviceGrid(degrees).describe()} (--world-size N checks a different number)")
    return degrees


def check_run_length(config: Config, data: DataSummary, degrees: ParallelDims, report: CheckReport) -> tuple[int, int]:
    """Return the number of optimizer steps of the whole run, and the number of samples per step over all ranks.

    Both numbers are 0 if a step needs more samples than the training period contains.

    Args:
        config: config of the run.
        data: summary of the data; it must have samples of the split train.
        degrees: size of each axis of the run's mesh.
        report: receives a note on the length, and an error if the period is too short or ``trainer.forecast_len_from``
            never reaches ``data.forecast_len``.
    """
    trainer = config.trainer
    num_steps = 0
    samples_per_step = 0
    with report.collect():
        trainer = divide_global_batch(config, degrees.num_sample_ranks).trainer
        # The two zeros are the first and the last step. The sampler is used only to compute the sizes of a step and of
        # an epoch.
        sampler = ResumableSampler(
            len(data.samples["train"]), trainer.train_batch_size, trainer.grad_accum_every, config.seed, 0, 0,
            num_sample_groups=degrees.num_sample_ranks,
        )  # fmt: skip
        samples_per_step = sampler.block_size
        num_steps = trainer.max_steps or trainer.num_epoch * sampler.steps_per_epoch
        division = ""
        if trainer.global_batch_size is not None:
            division = f" ({trainer.grad_accum_every} x {trainer.train_batch_size} on each data-parallel rank)"
        report.add_note(
            f"training: {num_steps} steps of {samples_per_step} samples{division}; an epoch has "
            f"{sampler.steps_per_epoch}"
        )
        ramp = trainer.forecast_len_from
        last_forecast_len = forecast_len_at(num_steps - 1, num_steps, config.data.forecast_len, ramp)
        if last_forecast_len != config.data.forecast_len:
            raise ConfigError(
                f"trainer.forecast_len_from: {ramp}: the last entry begins after the last of {num_steps} steps, so no "
                f"step would train on data.forecast_len {config.data.forecast_len}; begin it earlier"
            )
    return num_steps, samples_per_step


def check_walltime(
    config: Config, job: Job | None, remaining_steps: int, samples_per_step: int, report: CheckReport
) -> None:
    """Check that the walltime of the jobs is long enough for the remaining steps.

    The required time is estimated from the speed of earlier steps in metrics.jsonl. If there are no earlier steps, only
    the values of the walltimes are checked.

    Args:
        config: config of the run.
        job: training job of the configured cluster; None if no cluster is configured.
        remaining_steps: number of remaining optimizer steps.
        samples_per_step: number of samples per optimizer step over all ranks.
        report: receives errors and notes.
    """
    # Section that sets a walltime -> walltime in minutes.
    scheduler = "slurm" if job is None else job.scheduler
    limits = {}
    if config.trainer.walltime is not None:
        limits["trainer"] = parse_duration(config.trainer.walltime)
    if job is not None:
        limits[scheduler] = job.seconds // 60
    if len(limits) == 2 and limits["trainer"] > limits[scheduler]:
        report.add(
            f"trainer.walltime: {config.trainer.walltime} exceeds {scheduler}.walltime "
            f"{format_duration(limits[scheduler])}, after which the scheduler ends the job; leave it out, because the "
            f"job script passes the end of the job to the run"
        )
    if remaining_steps <= 0:
        report.add_note("training: no steps remain; raise trainer.max_steps or num_epoch to train longer")
        return
    if not limits:
        return

    # The shorter walltime ends the run.
    minutes, section_name = min((minutes, name) for name, minutes in limits.items())
    walltime = f"{section_name}.walltime: {format_duration(minutes)}"
    if minutes <= _MARGIN_MINUTES:
        report.add(f"{walltime} is too short: a run stops one minute before its end, to save; set a longer walltime")
        return

    # The speed of the last steps gives the time of the remaining steps and the number of jobs.
    rows = read_last_metrics(Path(config.save_loc))[-_SPEED_ROWS:]
    speeds = [row["samples_per_s"] for row in rows if row.get("samples_per_s")]
    if not speeds:
        return
    hours = remaining_steps * samples_per_step / median(speeds) / 3600
    needed_jobs = math.ceil(hours * 60 / (minutes - _MARGIN_MINUTES))
    allowed_jobs = max(config.pbs.chain or 1, config.slurm.chain or 1)
    if job is not None:
        allowed_jobs = max(allowed_jobs, job.links)
    text = f"{remaining_steps} steps take about {hours:.1f} h at {median(speeds):.3g} samples/s (metrics.jsonl)"
    report.add_note(f"time: {text}")
    if needed_jobs > allowed_jobs:
        plural = "s" if allowed_jobs > 1 else ""
        report.add(
            f"{walltime} and {allowed_jobs} job{plural} are too little: {text}, which is "
            f"{needed_jobs} jobs; set {scheduler}.chain: {needed_jobs} (a check does not see the --chain of credit "
            "submit), allow more time or more ranks, or train fewer steps"
        )
