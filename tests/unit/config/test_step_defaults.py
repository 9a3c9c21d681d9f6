"""Default durations are multiples of the time step, and durations in the config stay unchanged."""

from __future__ import annotations

import pytest

from credit.config import build_config
from credit.errors import ConfigError
from credit.forecast.initial_times import list_output_leads, parse_interval_minutes
from tests.unit.config.test_load import MINIMAL

BRED = {"members": 2, "perturbation": {"kind": "bred"}}


def build_document(timestep: str, **sections: dict) -> dict:
    return {**MINIMAL, "data": {**MINIMAL["data"], "timestep": timestep}, **sections}


@pytest.mark.parametrize(
    ("timestep", "every", "lead_time", "figure_leads"),
    [
        ("6h", "24h", "72h", ["24h", "72h"]),
        ("24h", "24h", "72h", ["24h", "72h"]),
        ("9h", "27h", "72h", ["27h", "72h"]),
        ("5d", "120h", "120h", ["120h"]),
        ("30d", "720h", "720h", ["720h"]),
    ],
)
def test_defaults_are_multiples_of_the_step(timestep: str, every: str, lead_time: str, figure_leads: list[str]) -> None:
    trainer = {**MINIMAL["trainer"], "preview": {}}
    config = build_config(build_document(timestep, inference={"ensemble": BRED}, trainer=trainer))
    assert config.inference.lead_time == config.trainer.preview.lead_time == lead_time
    assert config.verification.figure_leads == figure_leads
    assert config.inference.initial_times.every == config.inference.ensemble.perturbation.cycle == every
    step = config.data.step_minutes
    assert list_output_leads(config.inference, step)[-1] % step == 0
    assert parse_interval_minutes(config.inference.initial_times, step) % step == 0


def test_given_durations_are_not_changed() -> None:
    inference = {"lead_time": "90d", "initial_times": {"every": "60d"}}
    config = build_config(build_document("30d", inference=inference, verification={"figure_leads": ["60d"]}))
    assert (config.inference.lead_time, config.inference.initial_times.every) == ("2160h", "1440h")
    assert config.verification.figure_leads == ["1440h"]
    with pytest.raises(ConfigError, match="inference.lead_time: 72h is not a multiple of data.timestep 720h"):
        build_config(build_document("30d", inference={"lead_time": "72h"}))
    with pytest.raises(ConfigError, match="data.timestep"):
        build_config(build_document("a month"))
    with pytest.raises(ConfigError, match="inference"):
        build_config(build_document("30d", inference=["72h"]))
    assert (
        build_config(build_document("30d", inference={"initial_times": "latest"})).inference.initial_times == "latest"
    )
