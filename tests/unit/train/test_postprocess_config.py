"""Tests of ``model.postprocess``: units and directions of its variables, wrong entries, and static fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from credit.config import build_config
from credit.errors import ConfigError
from credit.train.build.assets import ModelAssets
from credit.train.build.initial_condition_checks import describe_static_mismatch
from credit.train.build.stepper import build_stepper
from tests.unit.forecast import air
from tests.unit.forecast.air import FLUXES, H, W, assemble, initial_state, raw_config, split, totals

# variable -> (units, factor to the units of `air`)
OTHER_UNITS = {
    "sp": ("hPa", 100.0),
    "q": ("g kg-1", 1e-3),
    "zs": ("m", 9.80665),
    "tp": ("mm day-1", 1e-3 / 4),
    "e": ("kg m**-2 s**-1", -21600e-3),
    **dict.fromkeys(FLUXES, ("W m-2", 21600.0)),
}


def test_budgets_close_in_other_units_and_directions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables are rates, in hPa, g per kg and metres, and some fluxes are positive upwards."""
    fields_of_air = air.fields
    scale = {}
    for name, (_, factor) in OTHER_UNITS.items():
        is_upward = name in ("ttr", "str")
        scale[name] = -factor if is_upward else factor

    def scaled_fields(config: Any) -> dict[str, np.ndarray]:
        return {name: field / scale.get(name, 1.0) for name, field in fields_of_air(config).items()}

    monkeypatch.setattr(air, "fields", scaled_fields)
    other_units = {name: units for name, (units, _) in OTHER_UNITS.items()}
    monkeypatch.setattr(air, "UNITS", air.UNITS | other_units)
    raw = raw_config(tmp_path)
    for name in ("tp", "e", *FLUXES):
        raw["data"]["variable_options"][name] = {**raw["data"]["variable_options"][name], "temporal": "mean"}
    raw["model"]["postprocess"] = [
        *air.POST[:2],
        {**air.POST[2], "evaporation_positive": "up"},
        {
            **air.POST[3],
            "top_down": ["tsr"], "top_up": ["ttr"], "surface_down": ["ssr", "sshf", "slhf"], "surface_up": ["str"],
        },
    ]  # fmt: skip
    raw["model"]["postprocess"][0]["maximum"] = 50.0
    config, assets, stepper = assemble(raw)
    state = initial_state(config, stepper)

    def compute_totals(physical: torch.Tensor) -> dict[str, float]:
        fields = split(assets.channels.output, physical[0].numpy())
        fields_of_air = {name: field * scale.get(name, 1.0) for name, field in fields.items()}
        return totals(config, fields_of_air, assets.static_CHW[0].astype(float) * 9.80665)

    before = compute_totals(stepper.normalizer.decode(state[:, :, 0], "prognostic"))
    with torch.no_grad():
        after = compute_totals(stepper.decode(stepper.step(state, torch.zeros(1, 1, 1, H, W))))
    assert after["dry"] == pytest.approx(before["dry"], rel=1e-7)
    assert after["water"] == pytest.approx(before["water"] - 1000 * (after["e"] + after["tp"]), rel=1e-7)
    energy_gain = after["tsr"] + after["ttr"] - sum(after[name] for name in FLUXES[2:])
    assert after["energy"] == pytest.approx(before["energy"] + energy_gain, rel=1e-8)
    assert abs(energy_gain) > 1e-6 * before["energy"]


def test_incoming_solar_radiation_covers_the_step(tmp_path: Path) -> None:
    """The forcing is in J m-2 already. A window that ends at the start of the step is refused."""
    raw = raw_config(tmp_path)
    entry = {**air.POST[3], "top_down": ["toa_incident_solar_radiation", "ttr"]}
    raw["model"]["postprocess"] = [entry]
    with pytest.raises(ConfigError, match=r"model\.postprocess\.0\.top_down: data\.solar\.window: past: .* set next"):
        assemble(raw)
    raw["data"]["solar"] = {"window": "next"}
    config, assets, stepper = assemble(raw)
    state = initial_state(config, stepper)
    solar_radiation = torch.full((1, 1, 1, H, W), 5e6)
    with torch.no_grad():
        output = stepper.step(state, stepper.normalizer.encode(solar_radiation, "dynamic_forcing"))

    def compute_totals(physical: torch.Tensor) -> dict[str, float]:
        fields = split(assets.channels.output, physical[0].numpy())
        return totals(config, fields, assets.static_CHW[0].astype(float))

    before = compute_totals(stepper.normalizer.decode(state[:, :, 0], "prognostic"))
    after = compute_totals(stepper.decode(output))
    energy_gain = 5e6 + after["ttr"] - sum(after[name] for name in FLUXES[2:])
    assert after["energy"] - before["energy"] == pytest.approx(energy_gain, abs=1e-7 * before["energy"])


def replace_key(*path: str | int, to: Any) -> Callable[[dict], None]:
    """Return a function that sets the key at `path` of a config."""

    def apply(raw: dict) -> None:
        *parents, key = path
        for parent in parents:
            raw = raw[parent]
        raw[key] = to

    return apply


FLUX = {"temporal": "accumulate"}
# name -> (change of the config, units of variables, message)
REFUSED_CASES = {
    "levels of its own": (
        replace_key("data", "variable_options", "q", to={"levels": [1, 2, 3]}),
        {},
        r"model\.postprocess\.1\.specific_humidity: q has its levels from",
    ),
    "units": (
        None,
        {"t": "degC"},
        r'model\.postprocess\.3\.temperature: t is in "degC"; a budget needs temperature in one of the units K;',
    ),
    "no units": (
        None,
        {"sp": ""},
        r"model\.postprocess\.1\.surface_pressure: sp is without units; .*data\.variable_options\.sp\.units",
    ),
    "amount called a mean": (
        replace_key("data", "variable_options", "tp", to={"temporal": "mean", "minimum": 0}),
        {},
        r'tp is in "m"; a budget needs flux of water, mean in one of the units kg m-2 s-1',
    ),
    "instantaneous": (
        replace_key("data", "variable_options", "ttr", to={}),
        {},
        r"model\.postprocess\.3\.top_down: data\.variable_options\.ttr\.tem",
    ),
    "negative rain": (
        replace_key("data", "variable_options", "tp", to=FLUX),
        {},
        r"set data\.variable_options\.tp\.minimum: 0",
    ),
    "order": (
        lambda raw: raw["model"]["postprocess"].reverse(),
        {},
        "water after energy would undo it; the order is hyperdiffusion, clamp, dry_mass, water, energy",
    ),
    "twice": (lambda raw: raw["model"]["postprocess"].append(air.POST[3]), {}, "energy is listed twice"),
    "clamp twice": (lambda raw: raw["model"]["postprocess"].insert(0, air.POST[0]), {}, "clamp of q is listed twice"),
    "minimum twice": (
        replace_key("data", "variable_options", "q", to={"minimum": 0}),
        {},
        r"model\.postprocess\.0\.minimum: data\.variable_options\.q\.minimum also sets this bound",
    ),
    "maximum twice": (
        replace_key("data", "variable_options", "q", to={"maximum": 1}),
        {},
        r"model\.postprocess\.0\.maximum: data\.variable_options\.q\.maximum also sets this bound",
    ),
    "bounds that leave nothing": (
        replace_key("data", "variable_options", "q", to={"minimum": 1, "maximum": 0}),
        {},
        r"variable_options\.q: minimum 1 must be below maximum 0",
    ),
    "no such variable": (
        replace_key("model", "postprocess", 1, "surface_pressure", to="ps"),
        {},
        '"ps" must be in prognostic.var',
    ),
    "no bounds": (
        replace_key("model", "postprocess", 0, to={"kind": "clamp", "variable": "q"}),
        {},
        "minimum, maximum or both",
    ),
    "empty bounds": (
        replace_key("model", "postprocess", 0, "maximum", to=-1),
        {},
        "minimum 0 must be below maximum -1",
    ),
    "no fluxes": (replace_key("model", "postprocess", 3, "top_down", to=[]), {}, "energy needs fluxes at the top"),
    "flux twice": (
        replace_key("model", "postprocess", 3, "top_up", to=["ttr"]),
        {},
        "ttr listed twice among the fluxes",
    ),
    "no direction": (
        lambda raw: raw["model"]["postprocess"][2].pop("evaporation_positive"),
        {},
        r"model\.postprocess\.2\.evaporation_positive: this key is missing",
    ),
    "no such kind": (
        replace_key("model", "postprocess", 0, "kind", to="clmp"),
        {},
        r'model\.postprocess\.0\.kind: "clmp" .* "clamp"',
    ),
    "no kind": (
        lambda raw: raw["model"]["postprocess"][0].pop("kind"),
        {},
        r"model\.postprocess\.0\.kind: this key is missing",
    ),
    "no such key": (
        replace_key("model", "postprocess", 0, "minimun", to=0),
        {},
        r'model\.postprocess\.0\.minimun: .* mean "minimum"',
    ),
}


@pytest.mark.parametrize("case", REFUSED_CASES)
def test_wrong_entries_are_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_config, units, message = REFUSED_CASES[case]
    raw = raw_config(tmp_path)
    raw["model"]["postprocess"] = [dict(entry) for entry in raw["model"]["postprocess"]]
    if change_config is not None:
        change_config(raw)
    monkeypatch.setattr(air, "UNITS", air.UNITS | units)
    with pytest.raises(ConfigError, match=message):
        assemble(raw)


def test_units_of_the_config_replace_missing_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = raw_config(tmp_path)
    raw["data"]["variable_options"]["sp"] = {"units": "Pa"}
    monkeypatch.setattr(air, "UNITS", air.UNITS | {"sp": ""})
    assemble(raw)


def test_variables_with_missing_cells_are_refused(tmp_path: Path) -> None:
    config, assets, stepper = assemble(raw_config(tmp_path))
    masked = replace(assets, masks={"sp": np.zeros((H, W), dtype=bool)})
    with pytest.raises(ConfigError, match=r"model\.postprocess\.1\.surface_pressure: sp has missing cells"):
        build_stepper(config, masked, stepper.model, torch.device("cpu"), amp=False)


def test_coefficients_without_budgets_are_refused(tmp_path: Path) -> None:
    raw = raw_config(tmp_path)
    raw["model"].pop("postprocess")
    with pytest.raises(ConfigError, match=r"data\.coefficients has no effect without"):
        build_config(raw)


def test_layers_round_trip_through_a_checkpoint(tmp_path: Path) -> None:
    _, assets, _ = assemble(raw_config(tmp_path))
    loaded = ModelAssets.from_stored(assets.to_meta(), assets.to_tensors())
    assert np.array_equal(loaded.layers.a, assets.layers.a)
    meta_without_layers = {key: value for key, value in assets.to_meta().items() if key != "layers"}
    assert ModelAssets.from_stored(meta_without_layers, assets.to_tensors()).layers is None


def test_a_static_mismatch_is_described(tmp_path: Path) -> None:
    _, assets, _ = assemble(raw_config(tmp_path))
    ground_CHW = assets.static_from_data_CHW
    assert ground_CHW.shape == (1, H, W)
    assert describe_static_mismatch(assets, ground_CHW * (1 + 1e-5)) == ""
    warning = describe_static_mismatch(assets, ground_CHW + 500)
    assert warning.startswith("zs (by up to 500): the static fields of the data differ")


def test_missing_cells_of_static_fields_are_not_compared(tmp_path: Path) -> None:
    _, assets, _ = assemble(raw_config(tmp_path))
    ground_CHW = assets.static_from_data_CHW
    trained_CHW = assets.static_CHW.copy()
    trained_CHW[:, :2] = np.nan
    data_CHW = ground_CHW.copy()
    data_CHW[:, 1:3] = np.nan
    for trained in (assets, replace(assets, static_CHW=trained_CHW)):
        for static_CHW in (ground_CHW, data_CHW):
            assert describe_static_mismatch(trained, static_CHW) == ""
            assert describe_static_mismatch(trained, static_CHW + 500).startswith("zs (by up to 500)")
    assert describe_static_mismatch(assets, np.full_like(ground_CHW, np.nan)) == ""
