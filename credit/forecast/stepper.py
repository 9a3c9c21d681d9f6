"""Single forecast steps and rollouts, for training, validation and forecasts.

The state is normalised and in float32, even if the network computes in lower precision. If the network and the fields
are in float64, the state is also in float64.

Shape suffixes: B batch, C channels, T time frames, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from credit.channels import ChannelMap
from credit.data.normalize import Normalizer
from credit.forecast.postprocess.base import PostprocessChain
from credit.models.kernels.recompute_cache import recompute_contexts
from credit.parallel.domain.domain import Domain

# Kind of noise (entry of ``model.noise``) -> noise of each sample, (B, ...).
Condition = Mapping[str, torch.Tensor]


class Stepper:
    """Runner of a network on normalised fields: makes single forecast steps and rollouts of several steps.

    Args:
        model: network that maps (B, C_in, T, H, W) to (B, C_out, 1, H, W). If the attribute `output_is_new` of its
            class is True, the stepper may overwrite the network's output in inference mode.
        channels: order of the channels in the input and the output of the network.
        normalizer: conversion between physical units and normalised space.
        static_CHW: static channels in physical units, on this rank's part of the grid.
        residual: True if the network predicts changes of the prognostic channels (see `step`).
        valid_CHW: bool, False in cells in which a prognostic channel is always missing. In these cells, the normalised
            state is always 0, the mean. None if no channel has missing cells.
        amp: True to compute the network in bfloat16.
        postprocess: chain that is applied to the output of every step; None for no post-processing.

    Attributes:
        uses_cuda_graphs: False by default. Set it to True if the network's blocks are replayed as CUDA graphs
            (``trainer.compile``).
        domain: the ranks that share the fields under domain parallelism; None if this rank has the whole fields.
    """

    def __init__(
        self,
        model: nn.Module,
        channels: ChannelMap,
        normalizer: Normalizer,
        static_CHW: torch.Tensor,
        residual: bool,
        valid_CHW: torch.Tensor | None,
        amp: bool = False,
        postprocess: PostprocessChain | None = None,
    ) -> None:
        self.model = model
        self.channels = channels
        self.normalizer = normalizer
        self.domain: Domain | None = getattr(model, "domain", None)
        self._output_is_new = getattr(model, "output_is_new", False)
        self._static_1CHW = normalizer.encode(static_CHW[None], "static")
        self._residual = residual
        self._amp = amp
        self._prognostic_slice = channels.output_slice("prognostic")
        self._valid_CHW = valid_CHW
        if postprocess is None:
            postprocess = PostprocessChain()
        self._postprocess = postprocess
        self.uses_cuda_graphs = False

    def begin_iteration(self) -> None:
        """Allow CUDA graphs to overwrite the results of all earlier passes of the network.

        A CUDA graph writes its results to the same memory at each replay. The results of passes between two calls of
        this method, such as the steps of a rollout, are not overwritten. Without CUDA graphs, this method does nothing.
        """
        if self.uses_cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()

    def step(
        self,
        state_BCTHW: torch.Tensor,
        forcing_BCTHW: torch.Tensor,
        factor_B1HW: torch.Tensor | None = None,
        condition: Condition | None = None,
    ) -> torch.Tensor:
        """Return the normalised output (B, C_out, H, W), float32, one step after the last frame of `state_BCTHW`.

        With residual prediction, a prognostic channel is its last frame plus a change. The change is the network's
        output times the standard deviation of the channel's change over a step. A diagnostic channel is always the
        network's output itself.

        Args:
            state_BCTHW: normalised prognostic channels of the input frames.
            forcing_BCTHW: normalised dynamic forcing of the same frames.
            factor_B1HW: factor that multiplies the change of all prognostic channels before the post-processing; None
                is equivalent to 1.
            condition: noise of each sample, by kind of noise; None to call the model without noise.
        """
        # The network's input consists of three groups of channels. Static fields are repeated over the frames.
        batch_size, _, num_frames = state_BCTHW.shape[:3]
        static_BCTHW = self._static_1CHW[:, :, None].expand(batch_size, -1, num_frames, -1, -1)
        groups = {"prognostic": state_BCTHW, "dynamic_forcing": forcing_BCTHW, "static": static_BCTHW}
        x_BCTHW = torch.cat([groups[name] for name in self.channels.input_order], dim=1)

        # Run the network, and drop the time dimension of its output, which has length 1. Without amp there is no
        # autocast context, because the meta device of a dry run has no autocast.
        precision = nullcontext()
        if self._amp:
            precision = torch.autocast(x_BCTHW.device.type, dtype=torch.bfloat16)
        # A model without noise gets only its input, because the `forward` of a plugin may have no second parameter.
        arguments = (x_BCTHW,) if condition is None else (x_BCTHW, condition)
        with precision:
            out_BCHW = self.model(*arguments)[:, :, 0]
        out_BCHW = _to_float32_or_wider(out_BCHW)

        # The prognostic channels: with residual prediction, the last frame plus the scaled output.
        previous_BCHW = state_BCTHW[:, :, -1]
        predicted_BCHW = out_BCHW[:, self._prognostic_slice]
        # In inference mode, the result overwrites the network's output to save memory.
        reuses_output = self._output_is_new and predicted_BCHW.is_inference()
        prognostic_BCHW = predicted_BCHW
        if self._residual:
            scale_1C11 = self.normalizer.tendency_scale_C[None, :, None, None]
            destination = predicted_BCHW if reuses_output else None
            prognostic_BCHW = torch.addcmul(previous_BCHW, scale_1C11, predicted_BCHW, out=destination)
        # Stochastically perturbed tendencies multiply the change over the step.
        if factor_B1HW is not None:
            prognostic_BCHW = previous_BCHW + factor_B1HW * (prognostic_BCHW - previous_BCHW)

        # The prognostic channels come first in the output. If they were overwritten in place, `out_BCHW` is complete.
        if not reuses_output or prognostic_BCHW is not predicted_BCHW:
            diagnostic_BCHW = out_BCHW[:, self._prognostic_slice.stop :]
            out_BCHW = torch.cat([prognostic_BCHW, diagnostic_BCHW], dim=1)
        return self._postprocess(out_BCHW, previous_BCHW, forcing_BCTHW[:, :, -1])

    def rollout(
        self,
        history_BCTHW: torch.Tensor,
        forcing: Callable[[int], torch.Tensor],
        num_steps: int,
        recompute: bool = False,
        factors: Iterator[torch.Tensor] | None = None,
        conditions: Iterator[Condition | None] | None = None,
    ) -> Iterator[torch.Tensor]:
        """Yield the normalised output (B, C_out, H, W) of each step; gradients flow through all steps.

        Args:
            history_BCTHW: normalised prognostic channels of the input frames.
            forcing: function that takes a step number, from 0, and returns the normalised dynamic forcing
                (B, C, T, H, W) of the input frames of this step.
            num_steps: number of steps.
            recompute: True to save memory by recomputing each step, except the last, in the backward pass. Only the
                state and the results of `credit.models.kernels.recompute_cache.cache_across_recompute` stay in memory.
                The last step is not recomputed, because the backward pass begins with it.
            factors: argument `factor_B1HW` of `step` for each step; None for no factors. Not allowed with `recompute`.
            conditions: argument `condition` of `step` for each step; None for no noise.
        """
        assert factors is None or not recompute, "a recomputed step would use different factors"
        state = _to_float32_or_wider(history_BCTHW)
        del history_BCTHW  # free the memory now, not after the last step
        for number in range(num_steps):
            condition = None if conditions is None else next(conditions)
            is_last = number + 1 == num_steps
            if recompute and not is_last and torch.is_grad_enabled():
                output = checkpoint(
                    self.step,
                    state,
                    forcing(number),
                    None,
                    condition,
                    use_reentrant=False,
                    context_fn=recompute_contexts,
                )
            else:
                factor_B1HW = None if factors is None else next(factors)
                output = self.step(state, forcing(number), factor_B1HW, condition)
            # Replace the previous state, so that its memory is free while the caller uses the output.
            state = self._append_frame(state, output[:, self._prognostic_slice])
            yield output

    def _append_frame(self, state_BCTHW: torch.Tensor, newest_BCHW: torch.Tensor) -> torch.Tensor:
        """Return the input frames of the next step: the state without its earliest frame, then the newest frame.

        Cells that are always missing are set to 0 in the newest frame.
        """
        if self._valid_CHW is not None:
            newest_BCHW = newest_BCHW * self._valid_CHW
        newest_BCTHW = newest_BCHW[:, :, None]
        # With one input frame, the newest frame is the whole state, so no copy is needed.
        if state_BCTHW.shape[2] == 1:
            return newest_BCTHW
        return torch.cat([state_BCTHW[:, :, 1:], newest_BCTHW], dim=2)

    def perturb_state(self, state_BCTHW: torch.Tensor, change_BCTHW: torch.Tensor) -> torch.Tensor:
        """Return a state plus a perturbation, limited to the bounds of the post-processing.

        Cells that are always missing are not changed.

        Args:
            state_BCTHW: normalised prognostic channels of the input frames.
            change_BCTHW: perturbation in standard deviations of each channel's change over a step. Its T is the T of
                the state, or 1 to add the same perturbation to all frames.

        Returns:
            (B, C, T, H, W) normalised.
        """
        scale_1C111 = self.normalizer.tendency_scale_C[None, :, None, None, None]
        change_BCTHW = scale_1C111 * change_BCTHW
        if self._valid_CHW is not None:
            change_BCTHW = change_BCTHW * self._valid_CHW[None, :, None]
        return self._postprocess.limit_state(state_BCTHW + change_BCTHW)

    def decode(self, output_BCHW: torch.Tensor) -> torch.Tensor:
        """Convert an output of `step` to physical units, (B, C_out, H, W) float32.

        The bounds of the channels are applied again, because rounding may have moved values out of bounds.
        """
        return self._postprocess.limit_physical(self.normalizer.decode(output_BCHW, "output"))


def slice_forcing_by_step(forcing_BCTHW: torch.Tensor, num_frames: int) -> Callable[[int], torch.Tensor]:
    """Return a function for the argument `forcing` of `Stepper.rollout`, which slices one tensor of forcing by step.

    Args:
        forcing_BCTHW: normalised forcing of all frames, from the first input frame of the first step to the last input
            frame of the last step.
        num_frames: number of input frames of a step.
    """
    return lambda step_number: forcing_BCTHW[:, :, step_number : step_number + num_frames]


def _to_float32_or_wider(x: torch.Tensor) -> torch.Tensor:
    """Return `x` converted to float32, or unchanged if its dtype is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
