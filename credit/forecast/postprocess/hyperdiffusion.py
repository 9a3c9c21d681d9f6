"""Hyperdiffusion: waves that the grid can hardly carry are damped at every step, as in spectral dynamical cores.

A network that adds a change to its state leaves the errors of its shortest waves where they are: too small for the
loss, and in part unseen behind a strided embedding, they add up from step to step until a run of weeks breaks. Two
passes damp them. Along latitude circles a wave is judged by its length in kilometres, so this is a polar filter, too;
along meridians the rows are joined across the poles to great circles, where components of vectors change their sign.
"""

from __future__ import annotations

import torch
from torch import Tensor

from credit.calendar import parse_duration
from credit.data.formats.cf import is_vector_component
from credit.errors import ConfigError
from credit.forecast.postprocess.base import Postprocess, PostprocessContext, register_postprocess
from credit.forecast.postprocess.section import HyperdiffusionSection
from credit.grid import LatLonGrid


@register_postprocess("hyperdiffusion", HyperdiffusionSection)
class Hyperdiffusion(Postprocess):
    """Damps the prognostic channels of each output by a `WaveFilter`; masked channels stay as they are.

    Args:
        context: of the run.
        section: e-folding time and order.

    Raises:
        ConfigError: if the number of columns is odd, so that no column faces another across the pole.
    """

    def __init__(self, context: PostprocessContext, section: HyperdiffusionSection) -> None:
        super().__init__(context, section)
        columns = context.grid.shape[1]
        if columns % 2:
            raise ConfigError(f"{context.key}: hyperdiffusion needs an even number of columns, the grid has {columns}")
        prognostic = context.channels.group("prognostic")
        is_vector = []
        is_whole = []
        for channel in prognostic:
            standard_name = context.attributes.get(channel.variable, {}).get("standard_name", "")
            is_vector.append(is_vector_component(context.data.options_of(channel.variable).vector, standard_name))
            is_whole.append(channel.variable not in context.masks or not context.masks[channel.variable].any())
        self._num_prognostic = len(prognostic)
        self._filter = WaveFilter(
            context.grid,
            context.data.step_minutes,
            parse_duration(section.time),
            section.order,
            torch.tensor(is_vector, device=context.device),
            torch.tensor(is_whole, device=context.device),
        )

    def forward(self, output_BCHW: Tensor, previous_BCHW: Tensor, forcing_BCHW: Tensor) -> Tensor:
        """See the base class."""
        damped = self._filter(output_BCHW[:, : self._num_prognostic])
        return torch.cat([damped, output_BCHW[:, self._num_prognostic :]], dim=1)


class WaveFilter:
    """Multiplies a wave by exp(-(step / time) * (k / K)^order), K being the shortest wave that the grid carries.

    The shortest wave, K, spans two rows along meridians, and along latitude circles as many kilometres as two columns
    at the equator. The zonal mean and the wave once round the globe, of which wind across a pole consists, are left
    alone. An `order` of 2n is diffusion by the n-th power of the Laplacian in each direction.

    Args:
        grid: of the fields, rows nearly equally spaced, an even number of columns.
        step_minutes: of a forecast step.
        time_minutes: e-folding time of the shortest wave.
        order: power of the wave number.
        vector_C: bool, which channels are components of vectors.
        whole_C: bool, False for channels that are masked somewhere, which stay as they are.
    """

    def __init__(
        self, grid: LatLonGrid, step_minutes: int, time_minutes: int, order: int, vector_C: Tensor, whole_C: Tensor
    ) -> None:
        rows, self._columns = grid.shape
        assert self._columns % 2 == 0, "no column faces another across the pole"
        self._pole_points = grid.has_pole_points
        self._circle = 2 * (rows - 1) if self._pole_points else 2 * rows
        rate = step_minutes / time_minutes
        device = vector_C.device
        meridional = torch.arange(self._circle // 2 + 1, dtype=torch.float64) / (self._circle / 2)
        wave = torch.arange(self._columns // 2 + 1, dtype=torch.float64)
        shortest_H = self._columns / 2 * torch.cos(torch.deg2rad(torch.from_numpy(grid.lat))).clamp(min=1e-9)
        zonal = wave / shortest_H[:, None]
        zonal[:, :2] = 0
        self._meridional_K1 = torch.exp(-rate * meridional**order).float()[:, None].to(device)
        self._zonal_HK = torch.exp(-rate * zonal**order).float().to(device)
        self._sign_C11 = torch.where(vector_C, -1.0, 1.0)[:, None, None]
        self._whole_C11 = whole_C[:, None, None]

    def __call__(self, x_BCHW: Tensor) -> Tensor:
        """Return the damped fields (B, C, H, W), float32; components of vectors must have the mean 0."""
        rows = x_BCHW.shape[2]
        beyond = (self._sign_C11 * x_BCHW).roll(self._columns // 2, dims=3).flip(2)
        circle = torch.cat([x_BCHW, beyond[:, :, 1:-1] if self._pole_points else beyond], dim=2)
        waves = torch.fft.rfft(circle, dim=2) * self._meridional_K1
        damped = torch.fft.irfft(waves, n=self._circle, dim=2)[:, :, :rows]
        damped = torch.fft.irfft(torch.fft.rfft(damped, dim=3) * self._zonal_HK, n=self._columns, dim=3)
        return torch.where(self._whole_C11, damped, x_BCHW)
