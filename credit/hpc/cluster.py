"""Cluster files: YAML files with the queues, limits, modules and launchers of a site, one file for each site."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from credit.calendar import parse_duration
from credit.config.load import build_section, read_yaml
from credit.config.sections.base import Duration, StrictModel
from credit.config.sections.execution import Name, PbsConfig, SchedulerConfig, SlurmConfig, Word
from credit.errors import ConfigError, did_you_mean


class Queue(StrictModel):
    """Limits of a queue, QOS or partition."""

    max_walltime: Duration | None = Field(None, description="Longest walltime of a job.")


class _Site(StrictModel):
    """Keys of cluster files that are the same for both schedulers."""

    title: str = Field(description="Name of the site.")
    required: list[Name] = Field([], description="Keys that the config must set at this site.")
    queues: dict[Word, Queue] = Field({}, description="Limits by queue, QOS or partition.")
    start: list[str] = Field(
        description="Command that starts processes on the nodes of a job. {ranks} is the number of processes, and "
        "{ranks_per_node} is the number of processes on each node."
    )


class PbsCluster(_Site):
    """Cluster file of a site with PBS."""

    scheduler: Literal["pbs"]
    remote_shell: list[str] = Field(
        ["ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4", "{node}"],
        description="Command that starts a shell on a node of the job, for jobs with `min_nodes`. {node} is the name "
        "of the node.",
    )
    defaults: PbsConfig = Field(PbsConfig(), description="Default values of the section `pbs`, for all jobs.")
    with_gpus: PbsConfig = Field(PbsConfig(), description="Default values only for jobs with GPUs.")
    without_gpus: PbsConfig = Field(PbsConfig(), description="Default values only for jobs without GPUs.")


class SlurmCluster(_Site):
    """Cluster file of a site with Slurm."""

    scheduler: Literal["slurm"]
    defaults: SlurmConfig = Field(SlurmConfig(), description="Default values of the section `slurm`, for all jobs.")
    with_gpus: SlurmConfig = Field(SlurmConfig(), description="Default values only for jobs with GPUs.")
    without_gpus: SlurmConfig = Field(SlurmConfig(), description="Default values only for jobs without GPUs.")


Cluster = PbsCluster | SlurmCluster


def cluster_names() -> list[str]:
    """Return the names of the cluster files in the package, sorted."""
    folder = resources.files("credit.hpc") / "clusters"
    names = []
    for file in folder.iterdir():
        if file.name.endswith(".yml"):
            names.append(file.name.removesuffix(".yml"))
    return sorted(names)


def load_cluster(name: str) -> Cluster:
    """Read a cluster file.

    Args:
        name: name of a file in the package, or path of a file that ends in ``.yml`` or ``.yaml``.

    Raises:
        ConfigError: if the name is unknown (the message suggests the most similar name), or the file cannot be read or
            is not valid.
    """
    if name.endswith((".yml", ".yaml")):
        return _read_cluster_file(Path(name))
    if name not in cluster_names():
        raise ConfigError(
            f'cluster "{name}": no such site{did_you_mean(name, cluster_names())}; for a different site, give the '
            "path of a cluster file, which ends in .yml"
        )
    with resources.as_file(resources.files("credit.hpc") / "clusters" / f"{name}.yml") as path:
        return _read_cluster_file(path)


def _read_cluster_file(path: Path) -> Cluster:
    """Return the contents of a cluster file.

    Raises:
        ConfigError: if the file cannot be read or is not valid; the message lists every wrong key.
    """
    raw = read_yaml(path)
    cluster_classes: dict[str, type[Cluster]] = {"pbs": PbsCluster, "slurm": SlurmCluster}
    # The value is converted to a string, because a wrong value may be a list, which cannot be a key of a dict.
    scheduler = str(raw.get("scheduler"))
    if scheduler not in cluster_classes:
        raise ConfigError(f"cluster file {path}: scheduler: {raw.get('scheduler')!r}: must be pbs or slurm")
    return build_section(cluster_classes[scheduler], raw, origin=f"cluster file {path}")


def require_matching_scheduler(cluster: Cluster, section: PbsConfig | SlurmConfig) -> None:
    """Require that a section of the config (pbs or slurm) belongs to the scheduler of the cluster.

    Args:
        cluster: cluster file of the site.
        section: section pbs or slurm of the config; its key ``cluster`` is the name of the site.

    Raises:
        ConfigError: if the cluster uses a different scheduler.
    """
    if section.scheduler != cluster.scheduler:
        raise ConfigError(
            f"{section.scheduler}.cluster: {section.cluster}: {cluster.title} uses {cluster.scheduler}; set "
            f"{cluster.scheduler}.cluster instead"
        )


def resolve_settings(cluster: Cluster, section: SchedulerConfig, uses_gpus: bool) -> PbsConfig | SlurmConfig:
    """Return the settings of a job: the defaults of the cluster file, replaced with the keys that the config sets.

    Mappings are merged key by key.

    Args:
        cluster: cluster file of the site.
        section: section pbs or slurm of the config.
        uses_gpus: True if the job uses GPUs.

    Raises:
        ConfigError: if a required key is missing, or a limit of the queue is exceeded.
    """
    device_defaults = cluster.with_gpus if uses_gpus else cluster.without_gpus
    values: dict[str, Any] = {}
    # The values of later layers replace those of earlier layers.
    for layer in (cluster.defaults, device_defaults, section):
        for key, value in layer.model_dump(exclude_none=True).items():
            if isinstance(value, Mapping):
                value = {**values.get(key, {}), **value}
            values[key] = value
    if not uses_gpus:
        # The section is the same for all jobs of a run, so it may contain GPUs that this job does not use.
        values["gpus_per_node"] = 0
    # Every job needs a time limit; a site may require additional keys, such as the account.
    for key in ("walltime", *cluster.required):
        if key not in values:
            raise ConfigError(
                f"{cluster.scheduler}.{key}: this key is missing, but {cluster.title} requires it; write it into the "
                f"config, or append {cluster.scheduler}.{key}=... to the command"
            )
    settings = type(cluster.defaults)(**values)
    _require_allowed_walltime(cluster, settings)
    return settings


def _require_allowed_walltime(cluster: Cluster, settings: PbsConfig | SlurmConfig) -> None:
    """Raise a ConfigError if the time limit of a job exceeds the limit of its queue."""
    # A queue may exist that the cluster file does not list, for example a reservation. Its limit is not known.
    queue = cluster.queues.get(settings.queue_name or "", Queue())
    if queue.max_walltime is None:
        return
    if parse_duration(settings.walltime) > parse_duration(queue.max_walltime):
        raise ConfigError(
            f"{cluster.scheduler}.walltime: {settings.walltime}: {settings.queue_name} of {cluster.title} allows "
            f"at most {queue.max_walltime}; use a shorter walltime and more jobs in a chain (--chain)"
        )
