"""Gathering of whole fields from the ranks of a domain group, for forecast steps that are written or scored.

With domain parallelism, each rank of a domain group has a part of the rows and columns of every field.

Shape suffixes: B forecasts of a batch, C output channels, H and W rows and columns of the grid, h and w of a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from credit.forecast.rollout import ForecastStart
from credit.forecast.shared_forecasts import ForecastFunction, StepFilter
from credit.parallel.domain.domain import Domain


class GatheringForecastFunction:
    """Forecast function that gathers the whole fields on the first rank of a domain group.

    All ranks of the group must call this function for the same batches in the same order, and advance the returned
    iterators in the same order. At each step that `is_step_used` selects, the first rank gets the whole fields in host
    memory. At all other steps, and on all other ranks, the output is None.

    Args:
        forecast_batch: function that makes the forecasts of a batch on this rank's part of the grid. At each step, it
            yields either an output or None, the same on all ranks of the group.
        domain: the ranks that share the fields.
        is_step_used: function that returns True for each step whose whole fields are needed. It must return the same
            value on all ranks.
    """

    def __init__(self, forecast_batch: ForecastFunction, domain: Domain, is_step_used: StepFilter) -> None:
        self._forecast_batch = forecast_batch
        self._domain = domain
        self._is_step_used = is_step_used

    def __call__(self, batch: Sequence[ForecastStart], num_steps: int) -> Iterator[Tensor | None]:
        """Collective: yield the output of each step of a batch of forecasts.

        Args:
            batch: starts of the forecasts of the batch.
            num_steps: number of steps.

        Yields:
            (B, C, H, W) in physical units on the host, or None if this rank does not receive the output.
        """
        for step, output_BChw in enumerate(self._forecast_batch(batch, num_steps), start=1):
            if output_BChw is None or not self._is_step_used(batch, step):
                yield None
            else:
                yield gather_fields(output_BChw, self._domain)


def gather_fields(parts_BChw: Tensor, domain: Domain) -> Tensor | None:
    """Collective: return the whole fields, in host memory, on the first rank, and None on the other ranks.

    The fields are sent one after another. So the first rank needs device memory for two fields, and every other rank
    needs device memory for its part of one field.

    Args:
        parts_BChw: this rank's part of the fields.
        domain: the ranks that share the fields.

    Returns:
        (B, C, H, W) on the host, or None.
    """
    if dist.get_rank(domain.group) != 0:
        for part_hw in parts_BChw.flatten(0, 1):
            dist.send(part_hw.contiguous(), group=domain.group, group_dst=0)
        return None
    device = parts_BChw.device
    parts = [domain.grid.owned(rank) for rank in range(domain.num_ranks)]
    # With pinned memory, a field is copied to the host while the next field is received.
    is_pinned = device.type == "cuda"
    shape = (*parts_BChw.shape[:2], *domain.grid.shape)
    fields_BCHW = torch.empty(shape, dtype=parts_BChw.dtype, pin_memory=is_pinned)
    for field_HW, part_hw in zip(fields_BCHW.flatten(0, 1), parts_BChw.flatten(0, 1), strict=True):
        device_field_HW = field_HW if device.type == "cpu" else part_hw.new_empty(domain.grid.shape)
        device_field_HW[parts[0].slices] = part_hw
        for rank in range(1, domain.num_ranks):
            received_hw = part_hw.new_empty(parts[rank].shape)
            dist.recv(received_hw, group=domain.group, group_src=rank)
            device_field_HW[parts[rank].slices] = received_hw
        if device.type != "cpu":
            field_HW.copy_(device_field_HW, non_blocking=True)
    if is_pinned:
        torch.cuda.current_stream(device).synchronize()
    return fields_BCHW
