"""Batch of samples in physical units, which the dataset returns and the prefetcher copies to the device.

Shape suffixes: B batch, C channels, T time frames, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """Batch of samples with float32 fields in physical units; all samples have the same numbers of frames and steps.

    Attributes:
        history_BCTHW: prognostic channels at the input frames; the last frame is at the initial time.
        forcing_BCTHW: dynamic forcing at the input frames and at all later frames that are inputs of the rollout.
        target_BCTHW: output channels (prognostic and diagnostic) at every forecast step.
        initial_minutes: (B,) initial times of the samples in minutes since 1900.
    """

    history_BCTHW: torch.Tensor
    forcing_BCTHW: torch.Tensor
    target_BCTHW: torch.Tensor
    initial_minutes: tuple[int, ...]

    def __post_init__(self) -> None:
        batch_sizes = {tensor.shape[0] for tensor in self.tensors()}
        assert batch_sizes == {len(self.initial_minutes)}, "the tensors have different batch sizes"
        # The rollout also needs forcing at its later inputs, so there may be more frames of forcing than of history.
        num_history_frames = self.history_BCTHW.shape[2]
        num_inputs = self.forcing_BCTHW.shape[2]
        assert num_inputs >= num_history_frames, "a batch needs forcing at all frames of its history"

    def to(self, device: torch.device) -> Batch:
        """Return a copy of the batch on a device.

        Pinned memory is copied asynchronously. Tensors on the meta device are replaced with uninitialised tensors.
        """

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_meta:
                return torch.empty_like(tensor, device=device)
            return tensor.to(device, non_blocking=True)

        return self._map(move)

    def pin_memory(self) -> Batch:
        """Return a copy of the batch in pinned memory, which a GPU can read directly; meta tensors are not changed."""

        def pin(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_meta:
                return tensor
            return tensor.pin_memory()

        return self._map(pin)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Register the tensors as used by `stream` in torch's allocator, which then does not reuse them too early."""
        for tensor in self.tensors():
            tensor.record_stream(stream)

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the batch in the order history, forcing, target."""
        return [self.history_BCTHW, self.forcing_BCTHW, self.target_BCTHW]

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Return a batch with `function` applied to each tensor."""
        history_BCTHW, forcing_BCTHW, target_BCTHW = map(function, self.tensors())
        return Batch(history_BCTHW, forcing_BCTHW, target_BCTHW, self.initial_minutes)
