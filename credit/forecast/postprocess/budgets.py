"""Budgets of the whole atmosphere: mass of dry air, water, energy; and the factors that close them.

Sums are over whole columns (`credit.data.sources.vertical_layers`) and, by area, over the globe, in float64; gradients
flow through all. The idea, and what is corrected in each budget, is that of Sha, Schreck, Chapman and Gagne (2025),
Improving AI weather prediction models using global mass and energy conservation schemes, arXiv:2501.05648; formulas and
code are our own. Shape suffixes: B batch, K layers, H latitude rows, W longitude columns. SI units.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from credit.data.sources.vertical_layers import VerticalLayers
from credit.grid import LatLonGrid
from credit.physics.thermodynamics import CP_DRY, CP_VAPOUR, GRAVITY, LATENT_HEAT

# kg m-2 of global mean precipitation below which there is nothing to scale
_NO_RAIN = 1e-9


class ColumnIntegrator:
    """Integrals over columns, and means over the globe.

    Args:
        layers: of the run's levels.
        grid: of the fields.
        device: of the fields.

    Attributes:
        is_linear: whether an integral is linear in surface pressure.
    """

    def __init__(self, layers: VerticalLayers, grid: LatLonGrid, device: torch.device) -> None:
        def tensor(array: object) -> Tensor:
            return torch.as_tensor(array, dtype=torch.float64, device=device)

        self._area_HW = tensor(grid.area_weights())
        # of hybrid levels: the layers' thickness in Pa is the first row plus the second times surface pressure
        self._thickness_2K = tensor(np.stack([one[:, 1] - one[:, 0] for one in (layers.a, layers.b)]))
        # of pressure levels: the lowest layer has no lower edge but the ground
        self._upper_K11 = tensor(layers.a[:, :1, None])
        most = np.where(layers.b[:, 1] > 0, np.inf, layers.a[:, 1] - layers.a[:, 0])
        self._most_K11 = tensor(most[:, None, None])
        self.is_linear = not layers.cut_by_ground

    def global_mean(self, x_BHW: Tensor) -> Tensor:
        """Return the mean over the globe by area, (B,) float64."""
        return (x_BHW.double() * self._area_HW).sum(dim=(1, 2))

    def integral(self, x_BKHW: Tensor, pressure_BHW: Tensor) -> Tensor:
        """Return the integral of x dp / g over each column, (B, H, W) float64.

        Args:
            x_BKHW: per kg, the layers in the order of the run's levels.
            pressure_BHW: at the ground, Pa.
        """
        x, pressure = x_BKHW.double(), pressure_BHW.double()
        if self.is_linear:
            fixed, growing = torch.matmul(self._thickness_2K, x.flatten(2)).unflatten(2, x.shape[2:]).unbind(1)
            return torch.addcmul(fixed, growing, pressure) / GRAVITY
        above_ground = (pressure[:, None] - self._upper_K11).clamp(
            min=torch.zeros_like(self._most_K11), max=self._most_K11
        )
        return (x * above_ground).sum(dim=1) / GRAVITY

    def growth(self, x_BKHW: Tensor, pressure_BHW: Tensor) -> Tensor:
        """Return the derivative of `integral` by surface pressure, (B, H, W) float64, kg m-2 Pa-1 times x."""
        x = x_BKHW.double()
        if self.is_linear:
            return torch.matmul(self._thickness_2K[1], x.flatten(2)).unflatten(1, x.shape[2:]) / GRAVITY
        above_ground = pressure_BHW.double()[:, None] - self._upper_K11
        grows = (above_ground > 0) & (above_ground < self._most_K11)
        return (x * grows).sum(dim=1) / GRAVITY


def dry_mass(columns: ColumnIntegrator, pressure_BHW: Tensor, water_BKHW: Tensor) -> Tensor:
    """Return the global mean mass of dry air, (B,) kg m-2: the integral of (1 - q) dp / g.

    Args:
        columns: how to sum.
        pressure_BHW: at the ground, Pa.
        water_BKHW: q, all water in the air, kg kg-1.
    """
    return columns.global_mean(columns.integral(1.0 - water_BKHW.double(), pressure_BHW))


def water_mass(columns: ColumnIntegrator, pressure_BHW: Tensor, water_BKHW: Tensor) -> Tensor:
    """Return the global mean of water in the air, (B,) kg m-2; arguments as of `dry_mass`."""
    return columns.global_mean(columns.integral(water_BKHW, pressure_BHW))


def heat(columns: ColumnIntegrator, pressure_BHW: Tensor, temperature_BKHW: Tensor, humidity_BKHW: Tensor) -> Tensor:
    """Return the global mean of the integral of cp T dp / g, (B,) J m-2; cp = (1 - q) cp_dry + q cp_vapour."""
    humidity, temperature = humidity_BKHW.double(), temperature_BKHW.double()
    per_kg = torch.addcmul(CP_DRY * temperature, humidity, temperature, value=CP_VAPOUR - CP_DRY)
    return columns.global_mean(columns.integral(per_kg, pressure_BHW))


def other_energy(
    columns: ColumnIntegrator,
    pressure_BHW: Tensor,
    humidity_BKHW: Tensor,
    u_BKHW: Tensor,
    v_BKHW: Tensor,
    ground_HW: Tensor,
) -> Tensor:
    """Return the global mean of the integral of (L q + (u2 + v2) / 2 + ground) dp / g, (B,) J m-2.

    With `heat` it is the energy of the air. Internal energy and geopotential, summed over a hydrostatic column, are
    together cp T and the geopotential of the ground, so no height is needed.

    Args:
        columns: how to sum.
        pressure_BHW: at the ground, Pa.
        humidity_BKHW: specific humidity, kg kg-1.
        u_BKHW: eastward wind, m s-1.
        v_BKHW: northward wind, m s-1.
        ground_HW: geopotential of the ground, m2 s-2.
    """
    u, v = u_BKHW.double(), v_BKHW.double()
    per_kg = torch.add(ground_HW.double(), humidity_BKHW.double(), alpha=LATENT_HEAT)
    per_kg = torch.addcmul(torch.addcmul(per_kg, u, u, value=0.5), v, v, value=0.5)
    return columns.global_mean(columns.integral(per_kg, pressure_BHW))


def close_dry_mass(columns: ColumnIntegrator, wanted_B: Tensor, pressure_BHW: Tensor, water_BKHW: Tensor) -> Tensor:
    """Return surface pressure (B, H, W), float64, scaled so that the air's dry mass is as wanted.

    A factor leaves the gradient of ln ps as it is, by which surface pressure drives winds over mountains. The mass is
    linear in it on hybrid levels; on pressure levels but for cells where the ground passes an edge, for which it is
    corrected once more.

    Args:
        columns: how to sum.
        wanted_B: kg m-2.
        pressure_BHW: at the ground, Pa.
        water_BKHW: all water in the air, kg kg-1.
    """
    pressure = pressure_BHW.double()
    for _ in range(1 if columns.is_linear else 2):
        missing = wanted_B - dry_mass(columns, pressure, water_BKHW)
        growth = columns.global_mean(pressure * columns.growth(1.0 - water_BKHW.double(), pressure))
        pressure = pressure * (1.0 + missing / growth)[:, None, None]
    return pressure


def close_water(columns: ColumnIntegrator, wanted_B: Tensor, precipitation_BHW: Tensor) -> Tensor:
    """Return precipitation (B, H, W), float64, scaled to the wanted global mean, to 0 where that is negative.

    Args:
        columns: how to sum.
        wanted_B: evaporation minus the change of the water in the air, kg m-2.
        precipitation_BHW: kg m-2.
    """
    total = columns.global_mean(precipitation_BHW).clamp(min=_NO_RAIN)
    return precipitation_BHW.double() * (wanted_B / total).clamp(min=0.0)[:, None, None]


def close_energy(wanted_B: Tensor, temperature_BKHW: Tensor, heat_B: Tensor) -> Tensor:
    """Return temperature (B, K, H, W), float64, scaled so that its `heat` is as wanted.

    Args:
        wanted_B: J m-2 of heat.
        temperature_BKHW: K.
        heat_B: its heat.
    """
    return temperature_BKHW.double() * (wanted_B / heat_B)[:, None, None, None]
