"""Rank facts of this process; the only reader of rank and job variables."""

from __future__ import annotations

import os
from dataclasses import dataclass

from credit.config.schema_trainer import ParallelismConfig
from credit.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    """Where this process stands among the run's processes.

    Attributes:
        rank: of this process.
        world: number of processes.
        data_rank: position along the data-parallel axis.
        data_ranks: length of that axis.
        job_id: of the scheduler, empty outside one.
    """

    rank: int = 0
    world: int = 1
    data_rank: int = 0
    data_ranks: int = 1
    job_id: str = ""

    @property
    def is_main(self) -> bool:
        """Whether this process writes logs and files."""
        return self.rank == 0


def read_launch(conf: ParallelismConfig) -> Launch:
    """Return the facts of this process.

    Raises:
        ConfigError: if more than one process is asked for, which this release does not run.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 or conf.tensor > 1 or conf.replicate > 1:
        raise ConfigError(
            f"trainer.parallelism: data {conf.data}, tensor {conf.tensor}, replicate {conf.replicate} on {world} "
            "processes: this release runs on one process; set tensor and replicate to 1 and start it without torchrun"
        )
    return Launch(job_id=os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID") or "")
