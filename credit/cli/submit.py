"""``credit submit``: write a job script and submit it."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from credit.cli.common import add_config_arguments, parse_path

if TYPE_CHECKING:
    from credit.config import Config
    from credit.config.sections.execution import PbsConfig, SlurmConfig
    from credit.hpc.cluster import Cluster
    from credit.hpc.job import Job

# Largest number of lines that a job with `min_nodes` prints about the number of ranks that train.
_MAX_SHOWN_NODES = 8

HELP = """Write the job script of CONFIG for PBS or Slurm from the cluster file of the computing centre, and submit it.

The script is written to save_loc/jobs, the logs to save_loc/logs and the job ids to save_loc/jobs.json. The
sections pbs and slurm of the config set account, queue, walltime, nodes and so on.

With --chain K, training continues in up to K jobs, one after another. The chain ends if save_loc/STATUS is done or
failed, or if two consecutive jobs finished no training step.

A rollout on N nodes is an array of N jobs that share the initial times. Scoring (--job verify) is one job of N nodes
whose ranks share the initial times; it uses GPUs only with --online.

example:
  credit submit config.yml --cluster derecho --nodes 4 --chain 5 pbs.account=ABCD0001
  credit submit config.yml --job rollout --dry-run"""

__all__ = ["HELP", "add_arguments", "run_command"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `credit submit`: CONFIG, overrides, kind and size of the job, and the job to wait for."""
    add_config_arguments(parser)
    parser.add_argument("--job", default="train", metavar="KIND", help="train (default), preprocess, rollout or verify")
    parser.add_argument(
        "--cluster",
        metavar="NAME",
        type=parse_path,
        help="name of the cluster, such as derecho, or path of a cluster file",
    )
    parser.add_argument(
        "--nodes", type=int, metavar="N", help="number of nodes of a job; for a rollout, number of jobs of the array"
    )
    parser.add_argument("--chain", type=int, metavar="K", help="largest number of consecutive jobs for training")
    parser.add_argument(
        "--online", action="store_true", help="with --job verify: make the forecasts during scoring, on nodes with GPUs"
    )
    parser.add_argument(
        "--model",
        metavar="RUN",
        type=parse_path,
        help="with --job verify --online: the run that makes the forecasts",
    )
    parser.add_argument(
        "--after",
        metavar="KIND",
        help="start after the submitted jobs of this kind (rollout) have ended without an error",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the script without writing or submitting it")
    parser.add_argument(
        "--cancel", action="store_true", help="delete the submitted jobs of this kind, the last of a chain first"
    )


def run_command(arguments: argparse.Namespace) -> int:
    """Write the job script and submit it, or print it, or cancel the jobs; return the exit status 0.

    Raises:
        ConfigError: if the config, an option or the settings of the cluster are wrong.
        CreditError: if the scheduler's command fails.
    """
    from pathlib import Path

    from credit.cli.verify import load_configs
    from credit.hpc.submit import cancel_jobs, render_preview, submit_job

    _require_compatible_options(arguments)
    config, model_config = load_configs(arguments, arguments.overrides)
    if arguments.cancel:
        job_ids = cancel_jobs(Path(config.save_loc).absolute(), arguments.job)
        # The last job of a chain was deleted first.
        print("deleted: " + " ".join(reversed(job_ids)))
        return 0
    job = _build_job(config, model_config, arguments)
    if arguments.dry_run:
        print(render_preview(job), end="")
        return 0
    job_ids = submit_job(job)
    print(f"submitted: {' '.join(job_ids)}")
    print(f"script     {job.script}")
    print(f"logs       {job.folder / 'logs'}")
    print(f"cancel it  credit submit {arguments.config} --job {arguments.job} --cancel")
    return 0


def _require_compatible_options(arguments: argparse.Namespace) -> None:
    """Raise a ConfigError that names the first option which does not apply to the kind of job."""
    from credit.errors import ConfigError, did_you_mean
    from credit.hpc.job import JOB_KINDS

    kinds = {"--job": arguments.job}
    if arguments.after:
        kinds["--after"] = arguments.after
    for option, kind in kinds.items():
        if kind not in JOB_KINDS:
            raise ConfigError(f"{option} {kind}: not a kind of job{did_you_mean(kind, JOB_KINDS)}")
    if arguments.chain is not None and arguments.job != "train":
        raise ConfigError(
            f"--chain: only training can be a chain; if {arguments.job} is stopped, submit it again and it continues"
        )
    if arguments.nodes is not None and arguments.job == "preprocess":
        raise ConfigError("--nodes: preprocess is one process on one node; leave it out")
    if arguments.online and arguments.job != "verify":
        raise ConfigError(f"--online: {arguments.job} scores nothing; use it with --job verify")
    if arguments.after == "train":
        raise ConfigError(
            "--after train: a training job may end without an error while the run continues in another job; submit "
            "when save_loc/STATUS says done"
        )


def _build_job(config: Config, model_config: Config | None, arguments: argparse.Namespace) -> Job:
    """Return the job of a config on the cluster that the options or the config name.

    Args:
        config: config of the run.
        model_config: config of the run that ``--model`` names; None without this option.
        arguments: options of the command.

    Raises:
        ConfigError: if no cluster is named, or the job is not possible on the cluster or with the config's parallelism.
    """
    from pathlib import Path

    from credit.config.batch_division import divide_global_batch
    from credit.config.load import build_section
    from credit.hpc.job import JobRequest, build_job
    from credit.parallel.mesh import plan_degrees

    # Options replace keys of the config's section pbs or slurm. The section is then validated again.
    cluster, section = find_cluster_section(config, arguments)
    options = {}
    for key in ("nodes", "chain"):
        value = getattr(arguments, key)
        if value is not None:
            options[key] = value
    section_keys = {**section.model_dump(), **options}
    section = build_section(type(section), section_keys, origin="credit submit")
    model_path = None
    if model_config is not None:
        model_path = Path(arguments.model)
    request = JobRequest(
        kind=arguments.job,
        experiment=config.experiment,
        folder=Path(config.save_loc),
        config=Path(arguments.config),
        overrides=arguments.overrides,
        variables=_collect_environment_variables(config, model_config, arguments),
        spread=config.inference.parallelism.needs_process_group,
        online=arguments.online,
        model=model_path,
        after=arguments.after,
    )
    job = build_job(request, cluster, section)

    # Raise errors here that would otherwise occur when the job starts.
    _require_divisible_ranks(config, job)
    if job.is_elastic:
        _check_elastic_batch(config, job)
    elif job.kind == "train":
        # The results are not used. The calls raise an error if the ranks cannot form a mesh or cannot divide a global
        # batch.
        degrees = plan_degrees(config.trainer.parallelism, job.ranks)
        divide_global_batch(config, degrees.num_sample_ranks)
    return job


def _require_divisible_ranks(config: Config, job: Job) -> None:
    """Raise a ConfigError if the number of ranks that share a forecast does not divide the ranks of the job."""
    from credit.errors import ConfigError

    parallelism = config.inference.parallelism
    if job.spread and job.ranks % parallelism.ranks_per_start:
        degrees = f"tensor {parallelism.tensor}"
        if parallelism.num_domain_ranks > 1:
            degrees = f"domain {parallelism.num_domain_ranks} x {degrees}"
        if parallelism.ensemble > 1:
            degrees = f"ensemble {parallelism.ensemble} x {degrees}"
        raise ConfigError(
            f"inference.parallelism: {degrees} does not divide the {job.ranks} ranks of this job; choose other nodes "
            "or ranks_per_node"
        )


def _check_elastic_batch(config: Config, job: Job) -> None:
    """Check that the global batch size suits a job with ``min_nodes``, which continues after the loss of nodes.

    Print how many ranks train with all nodes and after each of the first lost nodes.

    Raises:
        ConfigError: if the global batch size is not set, or cannot be divided among the ranks.
    """
    from credit.errors import ConfigError
    from credit.parallel.elastic.spare_ranks import choose_num_ranks

    trainer = config.trainer
    key = f"{job.scheduler}.min_nodes: {job.min_nodes}"
    if trainer.global_batch_size is None:
        raise ConfigError(
            f"{key}: needs trainer.global_batch_size, the number of samples of a step on any number of ranks"
        )
    shown_nodes = range(job.nodes, job.min_nodes - 1, -1)[:_MAX_SHOWN_NODES]
    for num_nodes in dict.fromkeys([*shown_nodes, job.min_nodes]):
        num_ranks = num_nodes * job.ranks_per_node
        num_training = choose_num_ranks(trainer.parallelism, trainer.global_batch_size, num_ranks)
        # Print to standard error, because --dry-run prints the script to standard output.
        print(f"{num_nodes} nodes: {num_training} of {num_ranks} ranks train", file=sys.stderr)


def find_cluster_section(config: Config, arguments: argparse.Namespace) -> tuple[Cluster, PbsConfig | SlurmConfig]:
    """Return the cluster that ``--cluster`` or the config names, and the config's section for its scheduler.

    Raises:
        ConfigError: if no cluster or several clusters are named, or the section that names the cluster is the section
            of a different scheduler.
    """
    from credit.errors import ConfigError
    from credit.hpc.cluster import load_cluster, require_matching_scheduler

    # The option overrides the config.
    if arguments.cluster is not None:
        cluster = load_cluster(arguments.cluster)
        section = config.pbs if cluster.scheduler == config.pbs.scheduler else config.slurm
        return cluster, section
    named_sections = [section for section in (config.pbs, config.slurm) if section.cluster]
    if len(named_sections) != 1:
        raise ConfigError(
            f"{arguments.config}: name the cluster with --cluster, or with either pbs.cluster or slurm.cluster"
        )
    section = named_sections[0]
    cluster = load_cluster(section.cluster)
    require_matching_scheduler(cluster, section)
    return cluster, section


def _collect_environment_variables(
    config: Config, model_config: Config | None, arguments: argparse.Namespace
) -> dict[str, str]:
    """Return name -> value of each environment variable that the job needs; variables that are not set are left out.

    The job needs the variables to which the configs refer, and PYTHONPATH for plugins. The variables must be written
    into the job script, because PBS does not pass on the variables of this shell.

    Args:
        config: config of the run.
        model_config: config of the run that ``--model`` names; None without this option.
        arguments: options of the command.
    """
    import os

    from credit.cli.verify import resolve_config_path
    from credit.config.load import apply_overrides, list_environment_variables, read_yaml

    names = list_environment_variables(apply_overrides(read_yaml(arguments.config), arguments.overrides))
    plugins = list(config.plugins)
    if model_config is not None:
        names |= list_environment_variables(read_yaml(resolve_config_path(arguments.model)))
        plugins += model_config.plugins
    if plugins:
        # Python searches for plugins in the folders of this variable.
        names.add("PYTHONPATH")
    # Only variables that are set in this shell can be passed on. The job reports missing variables.
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}
