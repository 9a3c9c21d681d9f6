"""Global budgets of the atmosphere (mass of dry air, water, energy) and the corrections that close them.

Integrals are over whole columns (`credit.data.sources.levels.vertical_layers`) in float64, and global means are
area-weighted. All functions are differentiable. The method, and the choice of the variable that each budget corrects,
follow Sha, Schreck, Chapman and Gagne (2025), Improving AI weather prediction models using global mass and energy
conservation schemes, arXiv:2501.05648. The docstrings of the functions give the formulas.

Symbols: g gravity, p pressure, T temperature, q mass fraction of water, L latent heat of vaporisation, cp specific heat
at constant pressure. All quantities are in SI units.

Shape suffixes: B batch, K layers, H latitude rows, W longitude columns.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from credit.data.sources.levels.vertical_layers import VerticalLayers
from credit.grid import LatLonGrid
from credit.parallel.domain.domain import Domain
from credit.physics.thermodynamics import CP_DRY, CP_VAPOUR, GRAVITY, LATENT_HEAT

# Global mean precipitation in kg m-2 below which no factor can close the budget.
_MIN_PRECIPITATION = 1e-9


class ColumnIntegrator:
    """Calculator of vertical integrals over columns, and of area-weighted means over the globe.

    Args:
        layers: edges of the pressure layers around the run's levels.
        grid: the whole grid.
        device: device of the fields.
        domain: the ranks that share the grid; None if this rank has the whole grid.

    Attributes:
        is_linear: True if integrals are linear in surface pressure. Integrals are linear on hybrid levels, but not on
            pressure levels, because there the ground intersects layers.
    """

    def __init__(
        self, layers: VerticalLayers, grid: LatLonGrid, device: torch.device, domain: Domain | None = None
    ) -> None:
        def to_tensor(array: np.ndarray) -> Tensor:
            return torch.as_tensor(array, dtype=torch.float64, device=device)

        a_thickness_K = layers.a[:, 1] - layers.a[:, 0]
        b_thickness_K = layers.b[:, 1] - layers.b[:, 0]
        area_HW = grid.area_weights()
        if domain is not None:
            area_HW = area_HW[domain.part.slices]
        self._area_HW = to_tensor(area_HW)
        self._domain = domain
        # On hybrid levels, the thickness of a layer in Pa is the first row plus the second row times surface pressure.
        self._thickness_2K = to_tensor(np.stack([a_thickness_K, b_thickness_K]))
        self._upper_edge_K11 = to_tensor(layers.a[:, :1, None])
        # On pressure levels, the lowest layer reaches down to the ground, so its thickness has no limit.
        max_thickness_K = np.where(layers.b[:, 1] > 0, np.inf, a_thickness_K)
        self._max_thickness_K11 = to_tensor(max_thickness_K[:, None, None])
        self.is_linear = not layers.cut_by_ground

    def global_mean(self, x_BHW: Tensor) -> Tensor:
        """Return the area-weighted global mean of each of B fields: (B,) float64, in the units of the fields.

        With domain parallelism, this method is a collective.
        """
        mean_B = (x_BHW.double() * self._area_HW).sum(dim=(1, 2))
        if self._domain is None:
            return mean_B
        return self._domain.sum(mean_B)

    def integrate(self, x_BKHW: Tensor, pressure_BHW: Tensor) -> Tensor:
        """Return the integral of x dp / g over each column, where g is the acceleration of gravity.

        Args:
            x_BKHW: quantity x per kg of air, with the layers in the order of the run's levels.
            pressure_BHW: surface pressure, Pa.

        Returns:
            (B, H, W) float64, in the units of x times kg m-2.
        """
        x_BKHW = x_BKHW.double()
        pressure_BHW = pressure_BHW.double()
        grid_shape = x_BKHW.shape[2:]
        if self.is_linear:
            # A single matrix product with both rows of the thickness reads x only once.
            integrals_B2HW = torch.matmul(self._thickness_2K, x_BKHW.flatten(2)).unflatten(2, grid_shape)
            constant_BHW, slope_BHW = integrals_B2HW.unbind(1)
            return torch.addcmul(constant_BHW, slope_BHW, pressure_BHW) / GRAVITY
        # The integral includes only the part of a layer above the ground. The lower limit is also a tensor, because
        # `clamp` requires two tensors or two numbers.
        thickness_BKHW = (pressure_BHW[:, None] - self._upper_edge_K11).clamp(
            min=torch.zeros_like(self._max_thickness_K11), max=self._max_thickness_K11
        )
        return (x_BKHW * thickness_BKHW).sum(dim=1) / GRAVITY

    def differentiate_integral(self, x_BKHW: Tensor, pressure_BHW: Tensor) -> Tensor:
        """Return the derivative of `integrate` with respect to surface pressure.

        Args:
            x_BKHW: quantity x per kg of air, with the layers in the order of the run's levels.
            pressure_BHW: surface pressure, Pa.

        Returns:
            (B, H, W) float64, in the units of x times kg m-2 Pa-1.
        """
        x_BKHW = x_BKHW.double()
        if self.is_linear:
            # The second row of the thickness is its derivative with respect to surface pressure.
            slope_BHW = torch.matmul(self._thickness_2K[1], x_BKHW.flatten(2)).unflatten(1, x_BKHW.shape[2:])
            return slope_BHW / GRAVITY
        depth_BKHW = pressure_BHW.double()[:, None] - self._upper_edge_K11
        # Only the layers that contain the ground become thicker with increasing surface pressure.
        is_cut_BKHW = (depth_BKHW > 0) & (depth_BKHW < self._max_thickness_K11)
        return (x_BKHW * is_cut_BKHW).sum(dim=1) / GRAVITY


def compute_global_mean_dry_mass(columns: ColumnIntegrator, pressure_BHW: Tensor, water_BKHW: Tensor) -> Tensor:
    """Return the global mean mass of dry air, (B,) in kg m-2: the integral of (1 - q) dp / g.

    Args:
        columns: integrator for the levels and grid of the run.
        pressure_BHW: surface pressure, Pa.
        water_BKHW: q, mass fraction of all water in the air (vapour and condensates), kg kg-1.
    """
    return columns.global_mean(columns.integrate(1.0 - water_BKHW.double(), pressure_BHW))


def compute_global_mean_water(columns: ColumnIntegrator, pressure_BHW: Tensor, water_BKHW: Tensor) -> Tensor:
    """Return the global mean water in the air, (B,) in kg m-2: the integral of q dp / g.

    Args:
        columns: integrator for the levels and grid of the run.
        pressure_BHW: surface pressure, Pa.
        water_BKHW: q, mass fraction of all water in the air (vapour and condensates), kg kg-1.
    """
    return columns.global_mean(columns.integrate(water_BKHW, pressure_BHW))


def compute_global_mean_heat(
    columns: ColumnIntegrator, pressure_BHW: Tensor, temperature_BKHW: Tensor, humidity_BKHW: Tensor
) -> Tensor:
    """Return the global mean heat of the air, the integral of cp T dp / g, (B,) in J m-2.

    cp is (1 - q) cp_dry + q cp_vapour.

    Args:
        columns: integrator for the levels and grid of the run.
        pressure_BHW: surface pressure, Pa.
        temperature_BKHW: T, K.
        humidity_BKHW: q, specific humidity, kg kg-1.
    """
    humidity_BKHW = humidity_BKHW.double()
    temperature_BKHW = temperature_BKHW.double()
    # cp T, written as cp_dry T + (cp_vapour - cp_dry) q T.
    heat_BKHW = torch.addcmul(CP_DRY * temperature_BKHW, humidity_BKHW, temperature_BKHW, value=CP_VAPOUR - CP_DRY)
    return columns.global_mean(columns.integrate(heat_BKHW, pressure_BHW))


def compute_global_mean_other_energy(
    columns: ColumnIntegrator,
    pressure_BHW: Tensor,
    humidity_BKHW: Tensor,
    u_BKHW: Tensor,
    v_BKHW: Tensor,
    ground_HW: Tensor,
) -> Tensor:
    """Return the global mean of latent, kinetic and surface potential energy, (B,) in J m-2.

    The energy is the integral of (L q + (u^2 + v^2) / 2 + ground) dp / g. The sum of `compute_global_mean_heat` and
    this function is the total energy of the air. The height of the layers is not needed: in a hydrostatic column,
    internal energy plus potential energy equals the integral of cp T plus the surface geopotential.

    Args:
        columns: integrator for the levels and grid of the run.
        pressure_BHW: surface pressure, Pa.
        humidity_BKHW: q, specific humidity, kg kg-1.
        u_BKHW: eastward wind, m s-1.
        v_BKHW: northward wind, m s-1.
        ground_HW: surface geopotential, m2 s-2.
    """
    u_BKHW = u_BKHW.double()
    v_BKHW = v_BKHW.double()
    energy_BKHW = torch.add(ground_HW.double(), humidity_BKHW.double(), alpha=LATENT_HEAT)
    energy_BKHW = torch.addcmul(energy_BKHW, u_BKHW, u_BKHW, value=0.5)
    energy_BKHW = torch.addcmul(energy_BKHW, v_BKHW, v_BKHW, value=0.5)
    return columns.global_mean(columns.integrate(energy_BKHW, pressure_BHW))


def close_dry_mass(columns: ColumnIntegrator, target_B: Tensor, pressure_BHW: Tensor, water_BKHW: Tensor) -> Tensor:
    """Return surface pressure, scaled so that the global mean mass of dry air is `target_B`.

    All pressures of a sample are multiplied by one factor. This preserves the horizontal gradient of ln(pressure), on
    which the pressure gradient force over mountains depends.

    Args:
        columns: integrator for the levels and grid of the run.
        target_B: global mean mass of dry air, kg m-2.
        pressure_BHW: surface pressure, Pa.
        water_BKHW: mass fraction of all water in the air, kg kg-1.

    Returns:
        (B, H, W) float64 surface pressure, Pa.
    """
    pressure_BHW = pressure_BHW.double()
    # Newton's method for the factor. On hybrid levels the mass is linear in surface pressure, so one iteration is
    # exact. On pressure levels the ground may cross the edge of a layer, so a second iteration is needed.
    num_iterations = 1 if columns.is_linear else 2
    for _ in range(num_iterations):
        missing_B = target_B - compute_global_mean_dry_mass(columns, pressure_BHW, water_BKHW)
        # Derivative of the mass with respect to the factor, at a factor of 1.
        derivative_BHW = columns.differentiate_integral(1.0 - water_BKHW.double(), pressure_BHW)
        derivative_B = columns.global_mean(pressure_BHW * derivative_BHW)
        pressure_BHW = pressure_BHW * (1.0 + missing_B / derivative_B)[:, None, None]
    return pressure_BHW


def close_water(columns: ColumnIntegrator, target_B: Tensor, precipitation_BHW: Tensor) -> Tensor:
    """Return precipitation, scaled so that its global mean is `target_B`, or 0 if `target_B` is negative.

    Args:
        columns: integrator for the levels and grid of the run.
        target_B: global mean of evaporation minus the change of the water in the air, kg m-2.
        precipitation_BHW: precipitation of the step, kg m-2.

    Returns:
        (B, H, W) float64 precipitation, kg m-2.
    """
    # The lower limit avoids a division by 0 in a sample without precipitation; its precipitation stays 0.
    mean_B = columns.global_mean(precipitation_BHW).clamp(min=_MIN_PRECIPITATION)
    factor_B = (target_B / mean_B).clamp(min=0.0)
    return precipitation_BHW.double() * factor_B[:, None, None]


def close_energy(target_B: Tensor, temperature_BKHW: Tensor, heat_B: Tensor) -> Tensor:
    """Return temperature, scaled so that the global mean heat of the air is `target_B`.

    Args:
        target_B: global mean heat that closes the energy budget, J m-2.
        temperature_BKHW: temperature, K.
        heat_B: global mean heat of `temperature_BKHW` from `compute_global_mean_heat`, J m-2.

    Returns:
        (B, K, H, W) float64 temperature, K.
    """
    factor_B = target_B / heat_B
    return temperature_BKHW.double() * factor_B[:, None, None, None]
