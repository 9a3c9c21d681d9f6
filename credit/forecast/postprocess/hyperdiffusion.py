"""Hyperdiffusion: damping of the shortest waves of the grid at every step. Spectral dynamical cores also use it.

A network that predicts the change of its state does not remove errors in the shortest waves. These errors are too small
to matter in the loss, and a strided embedding hides part of them from the network. So the errors grow from step to step
until a forecast of weeks becomes unstable. Two one-dimensional passes damp the shortest waves. The pass along latitude
circles measures wavelengths in kilometres, so it also acts as a polar filter. The pass along meridians joins each
meridian with the opposite meridian to a great circle. Vector components change sign across a pole.

Shape suffixes: B batch, C channels, H latitude rows, W longitude columns, K meridional wave numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from credit.calendar import parse_duration
from credit.data.formats.cf import is_vector_component
from credit.errors import ConfigError
from credit.forecast.postprocess.base import Postprocess, PostprocessContext, register_postprocess
from credit.forecast.postprocess.section import HyperdiffusionSection
from credit.grid import LatLonGrid
from credit.parallel.domain.division import divide_axis
from credit.parallel.domain.domain import Domain
from credit.parallel.domain.exchange import CellExchange, Cells


@register_postprocess("hyperdiffusion", HyperdiffusionSection)
class Hyperdiffusion(Postprocess):
    """Post-process that damps the shortest waves of prognostic channels; channels with missing cells are not changed.

    Args:
        context: channels, grid, time step and masks of the run.
        section: e-folding time and order of the damping.

    Raises:
        ConfigError: if the number of columns is odd, because a column then has no opposite column across the pole.
    """

    supports_domain = True

    def __init__(self, context: PostprocessContext, section: HyperdiffusionSection) -> None:
        super().__init__(context, section)
        num_columns = context.grid.shape[1]
        if num_columns % 2:
            raise ConfigError(
                f"{context.key}: hyperdiffusion needs an even number of columns, not {num_columns}; remove this entry"
            )
        prognostic = context.channels.group("prognostic")
        is_vector = []
        is_unmasked = []
        for channel in prognostic:
            vector_option = context.data.options_of(channel.variable).vector
            standard_name = context.attributes.get(channel.variable, {}).get("standard_name", "")
            is_vector.append(is_vector_component(vector_option, standard_name))
            # A filter would spread the fill values of missing cells.
            mask = context.masks.get(channel.variable)
            is_unmasked.append(mask is None or not mask.any())
        self._num_prognostic = len(prognostic)
        self._filter = WaveFilter(
            context.grid,
            context.data.step_minutes,
            parse_duration(section.time),
            section.order,
            torch.tensor(is_vector, device=context.device),
            torch.tensor(is_unmasked, device=context.device),
            context.domain,
        )

    def forward(self, output_BCHW: Tensor, previous_BCHW: Tensor, forcing_BCHW: Tensor) -> Tensor:
        """Return the output with damped prognostic channels; see `Postprocess.forward`."""
        # Prognostic channels come first in the output. Diagnostic channels are not an input of the next step, so their
        # errors do not grow.
        damped = self._filter(output_BCHW[:, : self._num_prognostic])
        return torch.cat([damped, output_BCHW[:, self._num_prognostic :]], dim=1)


class WaveFilter:
    """Filter that multiplies a wave of wave number k by exp(-(step / time) * (k / k_max)^order).

    k_max is the wave number of the shortest wave. Along meridians, the shortest wavelength is two rows. Along all
    latitude circles, the shortest wavelength is the width of two columns at the equator. The zonal mean and zonal wave
    number 1 are not damped, because wind across a pole has zonal wave number 1. An `order` of 2n is diffusion by the
    n-th power of the Laplacian in each direction.

    Args:
        grid: grid of the fields, with nearly equally spaced rows and an even number of columns.
        step_minutes: time step of the model in minutes.
        time_minutes: e-folding time of the shortest wave in minutes.
        order: exponent of the wave number, even.
        vector_C: (C,) bool, True for channels that are horizontal vector components, such as wind.
        unmasked_C: (C,) bool, False for channels with missing cells, which are not filtered.
        domain: the ranks that share the grid; None if this rank has the whole grid.
    """

    def __init__(
        self,
        grid: LatLonGrid,
        step_minutes: int,
        time_minutes: int,
        order: int,
        vector_C: Tensor,
        unmasked_C: Tensor,
        domain: Domain | None = None,
    ) -> None:
        num_rows, self._num_columns = grid.shape
        assert self._num_columns % 2 == 0, "columns have no opposite column across the pole"
        self._has_pole_points = grid.has_pole_points
        # Number of points of a great circle; a row at a pole belongs to both meridians.
        self._circle_length = 2 * num_rows
        if self._has_pole_points:
            self._circle_length = 2 * (num_rows - 1)
        # Number of e-folding times in a step, for the shortest wave.
        efoldings = step_minutes / time_minutes
        device = vector_C.device

        # Meridional pass: wave numbers along the great circle, relative to the largest wave number.
        largest_meridional = self._circle_length / 2
        relative_wave_K = torch.arange(self._circle_length // 2 + 1, dtype=torch.float64) / largest_meridional
        meridional_factor_K = torch.exp(-efoldings * relative_wave_K**order).float()
        self._meridional_factor_K1 = meridional_factor_K[:, None].to(device)

        # Zonal pass: the largest wave number of a row decreases towards the poles with the length of its circle.
        zonal_wave = torch.arange(self._num_columns // 2 + 1, dtype=torch.float64)
        # At a pole, where the circle has length 0, the lower limit avoids a division by 0.
        cos_lat_H = torch.cos(torch.deg2rad(torch.from_numpy(grid.lat))).clamp(min=1e-9)
        largest_zonal_H = self._num_columns / 2 * cos_lat_H
        relative_zonal_wave = zonal_wave / largest_zonal_H[:, None]
        # The zonal mean and zonal wave number 1 are not damped.
        relative_zonal_wave[:, :2] = 0
        # One row of factors for each latitude, one column for each zonal wave number.
        self._zonal_factor = torch.exp(-efoldings * relative_zonal_wave**order).float().to(device)
        self._sign_C11 = torch.where(vector_C, -1.0, 1.0)[:, None, None]
        self._unmasked_C11 = unmasked_C[:, None, None]
        self._exchange = None if domain is None else WaveFilterExchange(domain)
        if self._exchange is not None:
            self._zonal_factor = self._zonal_factor[self._exchange.rows.start : self._exchange.rows.stop]

    def __call__(self, x_BCHW: Tensor) -> Tensor:
        """Return the fields with damped short waves.

        Args:
            x_BCHW: normalised fields, float32. Vector components must be normalised with mean 0, because their sign
                changes across the poles.

        Returns:
            (B, C, H, W) float32.
        """
        if self._exchange is None:
            damped_BCHW = self._damp_zonally(self._damp_meridionally(x_BCHW))
        else:
            damped_BCHW = self._exchange.apply(x_BCHW, self._damp_meridionally, self._damp_zonally)
        return torch.where(self._unmasked_C11, damped_BCHW, x_BCHW)

    def _damp_meridionally(self, x_BCHW: Tensor) -> Tensor:
        """Return fields with short waves along meridians damped; a meridian and its opposite form a great circle.

        Args:
            x_BCHW: all H rows of some columns; the second half of the columns is opposite to the first half.

        Returns:
            Fields with the shape of `x_BCHW`.
        """
        num_rows, num_columns = x_BCHW.shape[2:]
        # The opposite column is half of the columns away; along the great circle, its rows are in reverse order.
        opposite_BCHW = (self._sign_C11 * x_BCHW).roll(num_columns // 2, dims=3).flip(2)
        if self._has_pole_points:
            # The rows at the poles belong to both meridians and must not be repeated in the circle.
            opposite_BCHW = opposite_BCHW[:, :, 1:-1]
        # Each meridian and the opposite meridian form a periodic circle, so a Fourier transform applies.
        circle = torch.cat([x_BCHW, opposite_BCHW], dim=2)
        meridional_waves = torch.fft.rfft(circle, dim=2) * self._meridional_factor_K1
        return torch.fft.irfft(meridional_waves, n=self._circle_length, dim=2)[:, :, :num_rows]

    def _damp_zonally(self, x_BCHW: Tensor) -> Tensor:
        """Return fields with short waves along latitude circles damped.

        Args:
            x_BCHW: all W columns of the rows that this rank damps.

        Returns:
            Fields with the shape of `x_BCHW`.
        """
        # The factors differ from row to row.
        zonal_waves = torch.fft.rfft(x_BCHW, dim=3) * self._zonal_factor
        return torch.fft.irfft(zonal_waves, n=self._num_columns, dim=3)


class WaveFilterExchange:
    """Exchange of cells between ranks for the two passes of a `WaveFilter` under domain parallelism.

    For the first pass, each rank receives all rows of some columns and of the opposite columns. For the second pass,
    each rank receives all columns of some rows. So a rank never holds much more than its share of a field.

    Args:
        domain: the ranks that share the grid.

    Attributes:
        rows: rows that this rank damps in the second pass.
    """

    def __init__(self, domain: Domain) -> None:
        height, width = domain.grid.shape
        # If there are more ranks than rows (or pairs of columns), several ranks compute the same rows (or pairs).
        pairs = divide_axis(width // 2, domain.num_ranks)
        rows = divide_axis(height, domain.num_ranks)
        meridians = [_build_meridian_cells(columns, width, height) for columns in pairs.held]
        owned_meridians = [_build_meridian_cells(columns, width, height) for columns in pairs.owned]
        circles = [Cells(part, range(width)) for part in rows.held]
        owned_circles = [Cells(part, range(width)) for part in rows.owned]
        self.rows = rows.held[dist.get_rank(domain.group)]
        self._to_meridians = domain.build_exchange(meridians)
        self._to_circles = CellExchange(domain.group, owned_meridians, meridians, [[cells] for cells in circles])
        self._to_parts = domain.build_return(owned_circles, circles)

    def apply(
        self,
        x_BCHW: Tensor,
        damp_meridionally: Callable[[Tensor], Tensor],
        damp_zonally: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Collective: return this rank's part of the fields after both passes.

        Args:
            x_BCHW: this rank's part of the fields.
            damp_meridionally: function of the first pass; its argument is whole columns with their opposite columns.
            damp_zonally: function of the second pass; its argument is whole rows.
        """
        columns_BCHW = damp_meridionally(self._to_meridians.exchange_fields(x_BCHW))
        rows_BCHW = damp_zonally(self._to_circles.exchange_fields(columns_BCHW))
        return self._to_parts.exchange_fields(rows_BCHW)


def _build_meridian_cells(columns: range, width: int, height: int) -> Cells:
    """Return all cells of some columns of the western half of the grid, followed by all cells of the opposite columns.

    Args:
        columns: columns of the western half of the grid.
        width: number of columns of the grid.
        height: number of rows of the grid.
    """
    opposite = [column + width // 2 for column in columns]
    return Cells(range(height), [*columns, *opposite])
