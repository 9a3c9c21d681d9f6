"""What is particular to a site: queues, limits, modules, networks. One YAML file a site."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from credit.calendar import parse_duration
from credit.config.load import build_section, read_yaml
from credit.config.schema_base import Duration, StrictModel
from credit.config.schema_jobs import Name, PbsConfig, SchedulerConfig, SlurmConfig, Word
from credit.errors import ConfigError, did_you_mean


class Queue(StrictModel):
    """What a queue allows."""

    max_walltime: Duration | None = Field(None, description="Longest job.")


class _Site(StrictModel):
    """What cluster files of both schedulers hold."""

    title: str = Field(description="The site, in words.")
    required: list[Name] = Field([], description="Keys that the site asks for and the config must give.")
    queues: dict[Word, Queue] = Field({}, description="Limits by queue, QOS or partition.")
    start: list[str] = Field(
        description="The command that starts processes on the nodes of a job. {ranks} stands for how many, "
        "{ranks_per_node} for how many on each node."
    )


class PbsCluster(_Site):
    """A site with PBS."""

    scheduler: Literal["pbs"]
    defaults: PbsConfig = Field(PbsConfig(), description="Values of the section `pbs`.")
    with_gpus: PbsConfig = Field(PbsConfig(), description="The same, for jobs that use GPUs only.")
    without_gpus: PbsConfig = Field(PbsConfig(), description="The same, for jobs that use none only.")


class SlurmCluster(_Site):
    """A site with Slurm."""

    scheduler: Literal["slurm"]
    defaults: SlurmConfig = Field(SlurmConfig(), description="Values of the section `slurm`.")
    with_gpus: SlurmConfig = Field(SlurmConfig(), description="The same, for jobs that use GPUs only.")
    without_gpus: SlurmConfig = Field(SlurmConfig(), description="The same, for jobs that use none only.")


Cluster = PbsCluster | SlurmCluster


def cluster_names() -> list[str]:
    """Return the names of the cluster files in the package."""
    folder = resources.files("credit.hpc") / "clusters"
    return sorted(item.name.removesuffix(".yml") for item in folder.iterdir() if item.name.endswith(".yml"))


def load_cluster(name: str) -> Cluster:
    """Read a cluster file.

    Args:
        name: of a file in the package, or the path of one, which ends in ``.yml`` or ``.yaml``.

    Raises:
        ConfigError: for a name that is none, with the nearest, and for every wrong key of the file.
    """
    if name.endswith((".yml", ".yaml")):
        return _read(Path(name))
    if name not in cluster_names():
        raise ConfigError(
            f'cluster "{name}": no such site{did_you_mean(name, cluster_names())}; for another site give the path of '
            "a cluster file that ends in .yml"
        )
    with resources.as_file(resources.files("credit.hpc") / "clusters" / f"{name}.yml") as path:
        return _read(path)


def _read(path: Path) -> Cluster:
    raw = read_yaml(path)
    kinds: dict[str, type[Cluster]] = {"pbs": PbsCluster, "slurm": SlurmCluster}
    kind = str(raw.get("scheduler"))
    if kind not in kinds:
        raise ConfigError(f"cluster file {path}: scheduler: {raw.get('scheduler')!r}: must be pbs or slurm")
    return build_section(kinds[kind], raw, origin=f"cluster file {path}")


def resolve(cluster: Cluster, section: SchedulerConfig, uses_gpus: bool) -> PbsConfig | SlurmConfig:
    """Return what a job asks for: the cluster's values, replaced by those of the config's section.

    Mappings are merged key by key.

    Raises:
        ConfigError: if a required key is missing, or a limit of the queue is exceeded.
    """
    layers = (cluster.defaults, cluster.with_gpus if uses_gpus else cluster.without_gpus, section)
    values: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.model_dump(exclude_none=True).items():
            values[key] = {**values.get(key, {}), **value} if isinstance(value, Mapping) else value
    if not uses_gpus:
        values["gpus_per_node"] = 0
    for key in ("walltime", *cluster.required):
        if key not in values:
            raise ConfigError(
                f"{cluster.scheduler}.{key}: this key is missing; {cluster.title} asks for it. Write it into the "
                f"config, or {cluster.scheduler}.{key}=... after the config's name"
            )
    asked = type(cluster.defaults)(**values)
    _check_walltime(cluster, asked)
    return asked


def _check_walltime(cluster: Cluster, asked: PbsConfig | SlurmConfig) -> None:
    queue = asked.queue if isinstance(asked, PbsConfig) else asked.qos or asked.partition
    # a queue that the file does not list may still be there: reservations come and go
    longest = cluster.queues.get(queue or "", Queue()).max_walltime
    if longest is not None and parse_duration(asked.walltime) > parse_duration(longest):
        raise ConfigError(
            f"{cluster.scheduler}.walltime: {asked.walltime}: {queue} of {cluster.title} allows {longest}; take less, "
            "and more links of a chain (--chain)"
        )
