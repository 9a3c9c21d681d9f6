"""Tests of the settings that a forecast takes from its own config and from the config of the training run."""

from __future__ import annotations

import copy

from credit.config import Config, build_config
from credit.config.sections.data import VariableOptions
from credit.train.build.forecaster import apply_trained_settings
from tests.unit.config.test_load import MINIMAL


def build_test_config(**variable_options: dict) -> Config:
    raw = copy.deepcopy(MINIMAL)
    raw["data"]["variables"] = {
        "prognostic": {"vars_2D": ["t2m"]},
        "diagnostic": {"vars_2D": ["tp"]},
        "dynamic_forcing": {"vars_2D": ["siconc"]},
    }
    raw["data"]["variable_options"] = variable_options
    return build_config(raw)


def test_bounds_of_forcing_come_from_the_forecast_config() -> None:
    """Bounds of outputs belong to the weights, so they come from the training config."""
    trained = build_test_config(tp={"minimum": 0}, siconc={"temporal": "mean", "maximum": 2})
    config = build_test_config(tp={"maximum": 9}, siconc={"minimum": 0, "in_forecast": "climatology"})
    options = apply_trained_settings(config, trained).data.variable_options
    assert options["tp"] == VariableOptions(minimum=0)
    assert options["siconc"] == VariableOptions(temporal="mean", minimum=0, in_forecast="climatology")
