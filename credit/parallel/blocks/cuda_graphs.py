"""Limits and number of the CUDA graphs of ``trainer.compile: reduce-overhead``.

`torch.compile` records the kernels of a compiled block as a CUDA graph when they first run. If a block runs several
times in a training step, each run gets a separate graph. Later steps replay the graphs, so the host starts a block with
a single call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from credit.errors import ConfigError

if TYPE_CHECKING:
    from credit.config.sections.trainer import TrainerConfig

# Value of ``trainer.compile``; torch.compile has a mode of the same name.
CUDA_GRAPHS = "reduce-overhead"


def require_one_rank_for_cuda_graphs(conf: TrainerConfig, num_ranks: int) -> None:
    """Require a single rank if the run uses CUDA graphs (``trainer.compile: reduce-overhead``).

    FSDP2 gathers weights into new memory in each pass, but a CUDA graph always reads the addresses of its recording.

    Args:
        conf: the trainer section of the config.
        num_ranks: number of ranks of the run.

    Raises:
        ConfigError: if the run uses CUDA graphs on several ranks; the message names the key.
    """
    if conf.compile == CUDA_GRAPHS and num_ranks > 1:
        raise ConfigError(
            f"trainer.compile: {CUDA_GRAPHS} works on one rank only, but the run has {num_ranks} ranks; set the key to "
            "true"
        )


def describe_cuda_graphs(conf: TrainerConfig, forecast_len: int, has_gpu: bool) -> list[str]:
    """Return notes for the user about the CUDA graphs of a run on one rank; an empty list without CUDA graphs.

    Args:
        conf: the trainer section of the config.
        forecast_len: largest number of rollout steps in training.
        has_gpu: True if the run uses a GPU.
    """
    if conf.compile != CUDA_GRAPHS:
        return []
    notes = []
    if not has_gpu:
        notes.append(f"trainer.compile: on a CPU, {CUDA_GRAPHS} has the same effect as true, without CUDA graphs")
    # If an ensemble is computed in several batches, all batches except the last are computed twice.
    num_batches = -(-conf.members // conf.members_at_once)
    num_passes = conf.grad_accum_every * forecast_len * (2 * num_batches - 1)
    if num_passes > 1:
        notes.append(
            f"trainer.compile: {CUDA_GRAPHS} records a CUDA graph of each block for each of the {num_passes} forward "
            f"passes of an optimizer step (grad_accum_every {conf.grad_accum_every}, data.forecast_len {forecast_len}, "
            f"{num_batches} batches of members); fewer and larger batches need less memory and start faster"
        )
    if forecast_len > 1 and conf.recompute_steps:
        notes.append("trainer.recompute_steps: the recomputed rollout steps have additional CUDA graphs")
    if conf.forecast_len_from is not None:
        notes.append("trainer.forecast_len_from: CUDA graphs are recorded again when the rollout becomes longer")
    return notes
