"""Notes on the CUDA graphs of ``trainer.compile: reduce-overhead``: where they do not apply, and how many there are.

`torch.compile` records the kernels of a compiled block as a CUDA graph when they first run, one graph for each place in
a training step at which the block runs. Later steps replay the graphs, so the host starts a block with one call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from credit.errors import ConfigError

if TYPE_CHECKING:
    from credit.config.sections.trainer import TrainerConfig

# Value of ``trainer.compile``, and the mode of torch.compile of the same name.
CUDA_GRAPHS = "reduce-overhead"


def require_one_rank(conf: TrainerConfig, num_ranks: int) -> None:
    """Refuse CUDA graphs on several ranks.

    FSDP2 gathers weights into new memory at each pass, but a CUDA graph reads the addresses that it was recorded with.

    Args:
        conf: the trainer section of the config.
        num_ranks: number of ranks of the run.

    Raises:
        ConfigError: naming the key.
    """
    if conf.compile == CUDA_GRAPHS and num_ranks > 1:
        raise ConfigError(
            f"trainer.compile: {CUDA_GRAPHS} works on one rank only, and the run has {num_ranks}; set it to true"
        )


def describe_cuda_graphs(conf: TrainerConfig, forecast_len: int, has_gpu: bool) -> list[str]:
    """Return notes on the CUDA graphs of a run on one rank, a sentence each; an empty list without CUDA graphs.

    Args:
        conf: the trainer section of the config.
        forecast_len: largest number of rollout steps in training.
        has_gpu: True if the run uses a GPU.
    """
    if conf.compile != CUDA_GRAPHS:
        return []
    notes = []
    if not has_gpu:
        notes.append(f"trainer.compile: {CUDA_GRAPHS} has CUDA graphs on a GPU only; on a CPU it compiles as true does")
    # An ensemble that is computed in several batches computes all but the last of them twice.
    num_batches = -(-conf.members // conf.members_at_once)
    num_passes = conf.grad_accum_every * forecast_len * (2 * num_batches - 1)
    if num_passes > 1:
        notes.append(
            f"trainer.compile: {CUDA_GRAPHS} records a CUDA graph of each block for each of the {num_passes} forward "
            f"passes of an optimizer step (grad_accum_every {conf.grad_accum_every}, data.forecast_len {forecast_len}, "
            f"{num_batches} batches of members); fewer and larger batches need less memory and a shorter start"
        )
    if forecast_len > 1 and conf.recompute_steps:
        notes.append("trainer.recompute_steps: the recomputed rollout steps have further CUDA graphs")
    if conf.forecast_len_from is not None:
        notes.append("trainer.forecast_len_from: CUDA graphs are recorded anew when the rollout becomes longer")
    return notes
