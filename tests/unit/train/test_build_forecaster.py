"""What a forecast takes of its own config, and what of the one that its weights were trained with."""

from __future__ import annotations

import copy

from credit.config import Config, build_config
from credit.config.schema_data import VariableOptions
from credit.train.build_forecaster import with_trained_settings
from tests.unit.config.test_load import MINIMAL


def _config(**fields: dict) -> Config:
    raw = copy.deepcopy(MINIMAL)
    raw["data"]["variables"] = {
        "prognostic": {"vars_2D": ["t2m"]},
        "diagnostic": {"vars_2D": ["tp"]},
        "dynamic_forcing": {"vars_2D": ["siconc"]},
    }
    raw["data"]["variable_options"] = fields
    return build_config(raw)


def test_bounds_of_forcing_are_the_forecasts_own() -> None:
    """Those of outputs belong to the weights."""
    trained = _config(tp={"minimum": 0}, siconc={"temporal": "mean", "maximum": 2})
    config = _config(tp={"maximum": 9}, siconc={"minimum": 0, "in_forecast": "climatology"})
    fields = with_trained_settings(config, trained).data.variable_options
    assert fields["tp"] == VariableOptions(minimum=0)
    assert fields["siconc"] == VariableOptions(temporal="mean", minimum=0, in_forecast="climatology")
