"""``credit_submit``: writes a job script from the config and submits it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from credit.cli.common import add_config_arguments, path_argument

if TYPE_CHECKING:
    from credit.config import Config
    from credit.hpc.job import Job

HELP = """Write the script of a job for PBS or Slurm from CONFIG and the site's cluster file, and submit it.

The script goes to save_loc/jobs, logs to save_loc/logs, the jobs' ids to save_loc/jobs.json. Keys of the sections pbs
and slurm say what is asked for: account, queue, walltime, nodes and so on. --chain K lets training go on in up to K
jobs, one after another; the chain ends by itself when save_loc/STATUS says done or failed, or when two jobs made no
step. A rollout on N nodes is an array of N jobs that share the initial times; verify is one job of N nodes whose ranks
share them, without GPUs unless --online forecasts meanwhile."""

__all__ = ["HELP", "add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG, overrides and options."""
    add_config_arguments(parser)
    parser.add_argument("--job", default="train", metavar="KIND", help="train (default), preprocess, rollout or verify")
    parser.add_argument(
        "--cluster", metavar="NAME", type=path_argument, help="the site, such as derecho, or the path of a cluster file"
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="nodes of a job; jobs of a rollout's array")
    parser.add_argument("--chain", type=int, metavar="K", help="how many jobs training may take, one after another")
    parser.add_argument("--online", action="store_true", help="of verify: forecast while scoring, on nodes with GPUs")
    parser.add_argument(
        "--model", metavar="RUN", type=path_argument, help="of verify with --online: the run that forecasts"
    )
    parser.add_argument(
        "--after", metavar="KIND", help="begin when the jobs of this kind, submitted before, have ended well: rollout"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the script and write nothing")
    parser.add_argument("--cancel", action="store_true", help="delete the jobs of this kind, the last of a chain first")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from pathlib import Path

    from credit.cli.verify import load_configs
    from credit.errors import ConfigError, did_you_mean
    from credit.hpc.job import KINDS
    from credit.hpc.submit import cancel, preview, submit

    for option, kind in (("--job", arguments.job), ("--after", arguments.after or arguments.job)):
        if kind not in KINDS:
            raise ConfigError(f"{option} {kind}: no kind of job{did_you_mean(kind, KINDS)}")
    if arguments.chain is not None and arguments.job != "train":
        raise ConfigError(
            f"--chain: only training is a chain; {arguments.job} submitted again goes on where it stopped"
        )
    if arguments.nodes is not None and arguments.job == "preprocess":
        raise ConfigError("--nodes: preprocess is one process on one node; leave it out")
    if arguments.online and arguments.job != "verify":
        raise ConfigError(f"--online: {arguments.job} scores nothing; it goes with --job verify")
    if arguments.after == "train":
        raise ConfigError(
            "--after train: a job of training may end well and the run go on in another; submit when STATUS says done"
        )
    config, model = load_configs(arguments, arguments.overrides)
    if arguments.cancel:
        print("deleted: " + " ".join(reversed(cancel(Path(config.save_loc).absolute(), arguments.job))))
        return 0
    job = _build(config, model, arguments)
    if arguments.dry_run:
        print(preview(job), end="")
        return 0
    ids = submit(job)
    print(f"submitted: {' '.join(ids)}\nscript     {job.script}\nlogs       {job.folder / 'logs'}")
    print(f"remove it  credit submit {arguments.config} --job {arguments.job} --cancel")
    return 0


def _build(config: Config, model: Config | None, arguments: argparse.Namespace) -> Job:
    import os
    from pathlib import Path

    from credit.cli.verify import resolve_config_path
    from credit.config.load import apply_overrides, build_section, read_yaml, referenced_env_vars
    from credit.errors import ConfigError
    from credit.hpc.cluster import load_cluster
    from credit.hpc.job import build_job
    from credit.parallel.mesh import plan_degrees

    named = [name for name in (config.pbs.cluster, config.slurm.cluster) if name]
    if arguments.cluster is None and len(named) != 1:
        raise ConfigError(f"{arguments.config}: give the site with --cluster, or one of pbs.cluster and slurm.cluster")
    cluster = load_cluster(arguments.cluster or named[0])
    section = config.pbs if cluster.scheduler == "pbs" else config.slurm
    if arguments.cluster is None and section.cluster is None:
        other = "slurm" if cluster.scheduler == "pbs" else "pbs"
        raise ConfigError(f"{other}.cluster: {named[0]}: {cluster.title} has {cluster.scheduler}; use that section")
    options = {key: getattr(arguments, key) for key in ("nodes", "chain") if getattr(arguments, key) is not None}
    section = build_section(type(section), {**section.model_dump(), **options}, origin="credit submit")
    # PBS starts a job without the environment of its submission
    wanted = referenced_env_vars(apply_overrides(read_yaml(arguments.config), arguments.overrides))
    if model is not None:
        wanted |= referenced_env_vars(read_yaml(resolve_config_path(arguments.model)))
    if config.plugins or (model is not None and model.plugins):
        wanted.add("PYTHONPATH")  # where they were found
    job = build_job(
        arguments.job,
        cluster,
        section,
        experiment=config.experiment,
        folder=Path(config.save_loc),
        config=Path(arguments.config),
        overrides=arguments.overrides,
        variables={name: os.environ[name] for name in sorted(wanted & set(os.environ))},
        spread=config.inference.parallelism.is_spread,
        online=arguments.online,
        model=Path(arguments.model) if model is not None else None,
        after=arguments.after,
    )
    tensor = config.inference.parallelism.tensor
    if job.spread and job.ranks % tensor:
        raise ConfigError(
            f"inference.parallelism.tensor: {tensor} does not divide the {job.ranks} ranks of this job; choose other "
            "nodes or ranks_per_node"
        )
    if job.kind == "train":
        plan_degrees(config.trainer.parallelism, job.ranks)
    return job
