"""One forecast step and many: the same generator trains, validates and forecasts.

State, residual addition and feedback live in normalised space in float32, whatever dtype the network computes in.
Shape suffixes: B batch, C channels, T time frames, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from credit.channels import ChannelMap
from credit.data.normalize import Normalizer
from credit.forecast.postprocess.clamp import Clamp, bounded_channels
from credit.forecast.postprocess.fixers import Fixers
from credit.forecast.postprocess.hyperdiffusion import Hyperdiffusion
from credit.models.kernels.recompute_cache import recompute_contexts


class Stepper:
    """Runs a network over normalised fields.

    Args:
        model: maps (B, C_in, T, H, W) to (B, C_out, 1, H, W). With `_output_is_new = True` in its class it keeps
            nothing of that tensor, and in inference mode the next state is written into it.
        channels: which channel lies where.
        normalizer: of the run.
        static_CHW: static channels in physical units.
        residual: whether the network predicts changes (see `step`).
        least: least physical value of each output channel, -inf where there is none.
        most: largest physical value of each output channel, inf where there is none.
        valid_CHW: bool, False where a prognostic channel is always missing; what is fed back there stays the mean.
            None where none is.
        amp: compute the network in bfloat16.
        hyperdiffusion: of the prognostic channels after each step, or None.
        constraints: budgets that each step closes, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        channels: ChannelMap,
        normalizer: Normalizer,
        static_CHW: torch.Tensor,
        residual: bool,
        least: Sequence[float],
        most: Sequence[float],
        valid_CHW: torch.Tensor | None,
        amp: bool = False,
        hyperdiffusion: Hyperdiffusion | None = None,
        constraints: Fixers | None = None,
    ) -> None:
        self.model = model
        self._output_is_new = getattr(model, "_output_is_new", False)
        self.channels = channels
        self.normalizer = normalizer
        self._static_1CHW = normalizer.encode(static_CHW[None], "static")
        self._residual = residual
        self._amp = amp
        self._prognostic = channels.output_slice("prognostic")
        device = normalizer.tendency_scale_C.device
        least_C, most_C = (torch.tensor(bounds, device=device) for bounds in (least, most))
        encoded = [normalizer.encode(bound_C[None], "output")[0] for bound_C in (least_C, most_C)]
        rows = bounded_channels(least, most)
        self._normalised_bounds = Clamp(rows, *encoded)
        self._state_bounds = Clamp([row for row in rows if row < self._prognostic.stop], *encoded)
        self._constraints = constraints
        # a budget has the last word; its factor cannot take a value below 0
        corrected = constraints.corrected if constraints is not None else []
        least_C[corrected] = least_C[corrected].clamp(max=0)
        most_C[corrected] = torch.inf
        self._physical_bounds = Clamp(rows, least_C, most_C)
        self._valid_CHW = valid_CHW
        self._hyperdiffusion = hyperdiffusion

    def step(
        self, state_BCTHW: torch.Tensor, forcing_BCTHW: torch.Tensor, factor_B1HW: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the normalised output (B, C_out, H, W), float32, one step after the last frame of `state_BCTHW`.

        With residual prediction a prognostic channel is the last frame plus the network's output times the standard
        deviation of the tendency, a diagnostic channel is the network's output itself (mean 0, deviation 1).

        Args:
            state_BCTHW: normalised prognostic channels of the input frames.
            forcing_BCTHW: normalised dynamic forcing of the same frames.
            factor_B1HW: of the change of the prognostic channels, before damping and budgets; None for 1.
        """
        batch, _, frames = state_BCTHW.shape[:3]
        static = self._static_1CHW[:, :, None].expand(batch, -1, frames, -1, -1)
        groups = {"prognostic": state_BCTHW, "dynamic_forcing": forcing_BCTHW, "static": static}
        x_BCTHW = torch.cat([groups[name] for name in self.channels.input_order], dim=1)
        with torch.autocast(x_BCTHW.device.type, dtype=torch.bfloat16, enabled=self._amp):
            out_BCHW = self.model(x_BCTHW)[:, :, 0]
        out_BCHW, last = out_BCHW.float(), state_BCTHW[:, :, -1]
        predicted = prognostic = out_BCHW[:, self._prognostic]
        # the network's output becomes the result, a field less to make and to fill, where nobody else wants it
        ours = self._output_is_new and predicted.is_inference()
        if self._residual:
            scale = self.normalizer.tendency_scale_C[None, :, None, None]
            prognostic = torch.addcmul(last, scale, predicted, out=predicted if ours else None)
        if factor_B1HW is not None:
            prognostic = last + factor_B1HW * (prognostic - last)
        if self._hyperdiffusion is not None:
            prognostic = self._hyperdiffusion(prognostic)
        if not ours or prognostic is not predicted:
            out_BCHW = torch.cat([prognostic, out_BCHW[:, self._prognostic.stop :]], dim=1)
        out_BCHW = self._normalised_bounds.apply(out_BCHW)
        if self._constraints is None:
            return out_BCHW
        return self._constraints(state_BCTHW[:, :, -1], forcing_BCTHW[:, :, -1], out_BCHW)

    def rollout(
        self,
        history_BCTHW: torch.Tensor,
        forcing: Callable[[int], torch.Tensor],
        steps: int,
        recompute: bool = False,
        factors: Iterator[torch.Tensor] | None = None,
    ) -> Iterator[torch.Tensor]:
        """Yield the normalised output (B, C_out, H, W) of each step; gradients flow through all of them.

        Args:
            history_BCTHW: normalised prognostic channels of the input frames.
            forcing: step number from 0 -> normalised dynamic forcing (B, C, T, H, W) of that step's input frames.
            steps: how many.
            recompute: keep only the state between steps, and the results that `recall` keeps, and compute each step
                again in the backward pass; not the last, where the backward pass begins.
            factors: for each step what `step` multiplies the change by.
        """
        state = history_BCTHW.float()
        del history_BCTHW  # or it would be held to the last step
        for number in range(steps):
            if recompute and number + 1 < steps and torch.is_grad_enabled():
                output = checkpoint(
                    self.step, state, forcing(number), use_reentrant=False, context_fn=recompute_contexts
                )
            else:
                output = self.step(state, forcing(number), None if factors is None else next(factors))
            # the state before is of no more use to a forecast, and who takes the output may take its time
            state = self._with(state, output[:, self._prognostic])
            yield output

    def _with(self, state_BCTHW: torch.Tensor, newest_BCHW: torch.Tensor) -> torch.Tensor:
        """Return the input frames of the next step."""
        if self._valid_CHW is not None:
            newest_BCHW = newest_BCHW * self._valid_CHW
        newest_BCTHW = newest_BCHW[:, :, None]
        return newest_BCTHW if state_BCTHW.shape[2] == 1 else torch.cat([state_BCTHW[:, :, 1:], newest_BCTHW], dim=2)

    def perturbed(self, state_BCTHW: torch.Tensor, change_BCTHW: torch.Tensor) -> torch.Tensor:
        """Return a normalised state moved by `change`, which is in standard deviations of the change over a step.

        Cells that are always missing stay as they are, and no value leaves its bounds.
        """
        scale = self.normalizer.tendency_scale_C[None, :, None, None, None]
        change_BCTHW = scale * change_BCTHW
        if self._valid_CHW is not None:
            change_BCTHW = change_BCTHW * self._valid_CHW[None, :, None]
        return self._state_bounds.apply(state_BCTHW + change_BCTHW)

    def decode(self, output_BCHW: torch.Tensor) -> torch.Tensor:
        """Return an output of `step` in physical units, within its bounds to the last bit."""
        return self._physical_bounds.apply(self.normalizer.decode(output_BCHW, "output"))


def forcing_windows(forcing_BCTHW: torch.Tensor, frames: int) -> Callable[[int], torch.Tensor]:
    """Return the function that `Stepper.rollout` wants, from the forcing of all inputs laid in one tensor."""
    return lambda number: forcing_BCTHW[:, :, number : number + frames]
