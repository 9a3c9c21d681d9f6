"""One batch of samples in physical units, as it travels from the dataset to the device.

Shape suffixes: B batch, C channels, T time frames, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch


@dataclass(frozen=True)
class Batch:
    """Samples that share one length of history and forecast.

    Attributes:
        history_BCTHW: prognostic channels at the input frames, the last of which is the initial time.
        forcing_BCTHW: dynamic forcing at the input frames and at every further input of the rollout.
        target_BCTHW: output channels at every forecast step.
        initial_B: int64 minutes of the initial times.
    """

    history_BCTHW: torch.Tensor
    forcing_BCTHW: torch.Tensor
    target_BCTHW: torch.Tensor
    initial_B: torch.Tensor

    def __post_init__(self) -> None:
        frames, inputs = self.history_BCTHW.shape[2], self.forcing_BCTHW.shape[2]
        assert len({getattr(self, f.name).shape[0] for f in fields(self)}) == 1, "members disagree on the batch size"
        assert inputs >= frames, "a batch needs forcing for its whole history"

    def to(self, device: torch.device) -> Batch:
        """Return the batch on `device`; pinned memory is copied in the background, meta tensors become empty ones."""
        return self._map(
            lambda tensor: (
                torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device, non_blocking=True)
            )
        )

    def pin_memory(self) -> Batch:
        """Return the batch in memory that a GPU can read by itself; meta tensors stay."""
        return self._map(lambda tensor: tensor if tensor.is_meta else tensor.pin_memory())

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tell the allocator that `stream` uses the batch, which was made on another."""
        for tensor in self.tensors():
            tensor.record_stream(stream)

    def tensors(self) -> list[torch.Tensor]:
        """Return the members in their order."""
        return [getattr(self, field.name) for field in fields(self)]

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        return replace(self, **{field.name: function(getattr(self, field.name)) for field in fields(self)})
