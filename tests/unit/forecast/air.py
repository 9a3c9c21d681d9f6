"""Small atmosphere with full columns, a network that perturbs it, and its budgets, summed with numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from credit.config import Config, build_config
from credit.data.store.statistics import Statistics
from credit.data.transforms import apply_transform
from credit.forecast.stepper import Stepper
from credit.grid import LatLonGrid
from credit.train.build.assets import ModelAssets, build_budget_layers
from credit.train.build.stepper import build_stepper
from tests.unit.data.hybrid_on_the_fly import half_levels

K, H, W = 8, 16, 32
GRID = LatLonGrid.equiangular(H, W, poles=False)
PRESSURE_LEVELS = [50, 150, 250, 400, 600, 700, 850, 1000]
FLUXES = ["tsr", "ttr", "ssr", "str", "sshf", "slhf"]
STEP_SECONDS = 21600.0
G = 9.80665
# Units of the variables, as in ERA5.
UNITS = {
    "t": "K", "u": "m s**-1", "v": "m s**-1", "q": "kg kg**-1", "sp": "Pa", "tp": "m", "e": "m of water equivalent",
    "zs": "m2 s-2", **dict.fromkeys(FLUXES, "J m**-2"),
}  # fmt: skip
AIR = {"surface_pressure": "sp"}
POST = [
    {"kind": "clamp", "variable": "q", "minimum": 0.0, "maximum": 0.05},
    {"kind": "dry_mass", **AIR},
    {"kind": "water", **AIR, "precipitation": "tp", "evaporation": "e", "evaporation_positive": "down"},
    {
        "kind": "energy", **AIR, "surface_geopotential": "zs",
        "top_down": ["tsr", "ttr"], "surface_down": ["ssr", "str", "sshf", "slhf"],
    },
]  # fmt: skip


def write_half_levels(folder: Path) -> Path:
    """Write a table of the hybrid coefficients and return its path."""
    a, b = half_levels(K)
    lines = ["n,a [Pa],b"]
    for number, (a_value, b_value) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        lines.append(f"{number},{a_value!r},{b_value!r}")
    path = folder / "half.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def raw_config(folder: Path, pressure: bool = False) -> dict[str, Any]:
    """Return the config of a run with every kind of budget, on model levels or on pressure levels."""
    flux = {"temporal": "accumulate"}
    data = {
        "sources": [{"path": "nowhere.nc"}],
        "level_units": "model_level", "levels": list(range(1, K + 1)), "coefficients": str(write_half_levels(folder)),
        "variables": {
            "prognostic": {"vars_3D": ["t", "u", "v", "q"], "vars_2D": ["sp"]},
            "diagnostic": {"vars_2D": ["tp", "e", *FLUXES]},
            "dynamic_forcing": {"vars_2D": ["toa_incident_solar_radiation"]},
            "static": {"vars_2D": ["zs"]},
        },
        "variable_options": {"tp": {"minimum": 0, **flux}, "e": flux, **dict.fromkeys(FLUXES, flux)},
        "splits": {name: ["2000-01-01", "2000-01-02"] for name in ("train", "valid", "test")},
    }  # fmt: skip
    if pressure:
        data |= {"level_units": "hPa", "levels": PRESSURE_LEVELS, "coefficients": None}
    return {
        "save_loc": str(folder / "run"),
        "data": data,
        "model": {"type": "wxformer", "postprocess": POST},
        "trainer": {"max_steps": 1},
    }


def without_budgets(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the config with its clamps as the only post-processing."""
    clamps = [entry for entry in raw["model"]["postprocess"] if entry["kind"] == "clamp"]
    data = {**raw["data"], "coefficients": None}
    return raw | {"data": data, "model": {**raw["model"], "postprocess": clamps}}


def fields(config: Config) -> dict[str, np.ndarray]:
    """Return an atmosphere: (K, H, W) or (H, W) of each variable, float64."""
    random = np.random.default_rng(3)
    ground = np.clip(random.normal(300.0, 900.0, (H, W)), 0.0, 4000.0) * G
    sp = 101325.0 * np.exp(-ground / G / 8000.0) * (1 + random.normal(0.0, 0.01, (H, W)))
    a, b = half_levels(K)
    middle = np.stack([0.5 * (a[k] + a[k + 1] + (b[k] + b[k + 1]) * sp) / 1e5 for k in range(K)])
    if config.data.level_units == "hPa":
        middle = np.array(PRESSURE_LEVELS)[:, None, None] / 1000 * np.ones((H, W))
    cos = np.cos(np.deg2rad(GRID.lat))[:, None]
    t = np.maximum((260 + 30 * cos + random.normal(0, 2, (K, H, W))) * middle**0.19, random.normal(205, 2, (K, H, W)))
    return {
        "t": t,
        "u": 20 * cos + random.normal(0, 8, (K, H, W)),
        "v": random.normal(0, 8, (K, H, W)),
        "q": 0.015 * middle**3 * cos**2 * random.uniform(0.2, 1.2, (K, H, W)),
        "sp": sp,
        "tp": np.maximum(random.normal(0.0, 1.5e-3, (H, W)), 0),
        "e": random.normal(-7e-4, 3e-4, (H, W)),
        **{
            name: random.normal(mean, 2e6, (H, W))
            for name, mean in zip(FLUXES, (5e6, -5.1e6, 3e6, -1e6, -4e5, -1.7e6), strict=True)
        },  # fmt: skip
        "zs": ground,
    }


class Disturbed(nn.Module):
    """Network that adds random fields with a drift to every channel, so that nothing is conserved."""

    def __init__(self, channels: int, seed: int = 1) -> None:
        super().__init__()
        self.size = nn.Parameter(torch.tensor(1.0))
        generator = torch.Generator().manual_seed(seed)
        noise_CHW = torch.randn(channels, H, W, generator=generator)
        drift_C11 = torch.randn(channels, 1, 1, generator=generator)
        self.noise = noise_CHW + 0.5 * drift_C11

    def forward(self, x_BCTHW: torch.Tensor) -> torch.Tensor:
        # The value of the forcing is the number of the step. It shifts the noise, so the noise differs between steps.
        step = x_BCTHW[0, 4 * K + 1, -1, 0, 0].item()
        shifted = self.noise.roll(round(7 * step), dims=2)
        return (self.size * shifted)[None, :, None].expand(len(x_BCTHW), -1, -1, -1, -1)


def assemble(raw: dict[str, Any], model: nn.Module | None = None) -> tuple[Config, ModelAssets, Stepper]:
    """Return the config, the assets and the stepper of a run."""
    config = build_config(raw)
    channels = config.data.channel_map()
    truth = fields(config)
    stored = channels.time_varying_stored + channels.static_stored
    names = []
    mean = []
    std = []
    for channel in stored:
        field = truth[channel.variable]
        if field.ndim == 3:
            levels = [other.level for other in stored if other.variable == channel.variable]
            field = field[levels.index(channel.level)]
        if channel.variable in config.data.transforms:
            field = apply_transform(field, config.data.transforms[channel.variable])
        names.append(channel.name)
        mean.append(field.mean())
        std.append(field.std() + {"q": 1e-6, "t": 1.0}.get(channel.variable, 0.0))
    std = np.array(std)
    zeros = np.zeros(len(names))
    statistics = Statistics(tuple(names), np.array(mean), std, zeros, zeros, zeros, 0.05 * std, zeros)
    attributes = {name: {"units": units} for name, units in UNITS.items()}
    static = np.stack([truth["zs"]]).astype(np.float32)
    assets = ModelAssets(channels, GRID, statistics, attributes, static, {}, None, build_budget_layers(config))
    model = model or Disturbed(len(channels.output))
    return config, assets, build_stepper(config, assets, model, torch.device("cpu"), amp=False)


def initial_state(config: Config, stepper: Stepper) -> torch.Tensor:
    """Return the normalised state (1, C, 1, H, W)."""
    truth = fields(config)
    stack = [truth[name] if truth[name].ndim == 3 else truth[name][None] for name in ("t", "u", "v", "q", "sp")]
    physical = torch.from_numpy(np.concatenate(stack).astype(np.float32))[None, :, None]
    return stepper.normalizer.encode(physical, "prognostic")


def split(channels: Any, fields_CHW: np.ndarray) -> dict[str, np.ndarray]:
    """Return variable -> (K, H, W) or (H, W), float64; `fields_CHW` may lack the last channels."""
    levels: dict[str, list[np.ndarray]] = {}
    for channel, field_HW in zip(channels, fields_CHW, strict=False):
        levels.setdefault(channel.variable, []).append(field_HW.astype(np.float64))
    fields = {}
    for variable, fields_of_levels in levels.items():
        fields[variable] = np.stack(fields_of_levels) if len(fields_of_levels) > 1 else fields_of_levels[0]
    return fields


def totals(config: Config, air: dict[str, np.ndarray], ground: np.ndarray) -> dict[str, float]:
    """Return dry mass, water and energy as global means, summed layer by layer."""
    edge = np.sin(np.deg2rad(np.linspace(90, -90, H + 1)))
    area = (edge[:-1] - edge[1:])[:, None] / 2 / W * np.ones((H, W))
    if config.data.level_units == "model_level":
        a, b = half_levels(K)
        half = [x + y * air["sp"] for x, y in zip(a, b, strict=True)]
    else:
        p = 100.0 * np.array(PRESSURE_LEVELS)
        half = [np.minimum(x, air["sp"]) for x in [0.0, *(p[1:] + p[:-1]) / 2]] + [air["sp"]]
    result = {"dry": 0.0, "water": 0.0, "energy": 0.0}
    for k in range(K):
        mass = (half[k + 1] - half[k]) / G
        q, t = air["q"][k], air["t"][k]
        cp = (1 - q) * 3.5 * 287.0597 + q * 4 * 461.525
        energy = cp * t + 2.5008e6 * q + 0.5 * (air["u"][k] ** 2 + air["v"][k] ** 2) + ground
        for name, per_kg in (("dry", 1 - q), ("water", q), ("energy", energy)):
            result[name] += float((area * mass * per_kg).sum())
    return result | {name: float((area * air[name]).sum()) for name in ("tp", "e", *FLUXES) if name in air}
