"""Config section of a source: options that a plugin declares, and invalid combinations."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from credit.config.sections import source as source_section
from credit.config.sections.base import StrictModel
from credit.config.sections.source import SourceConfig, register_source_type


class CountedOptions(StrictModel):
    number: int
    colour: Any = None


@pytest.fixture(autouse=True)
def registered_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_section, "_OPTION_SECTIONS", {})
    register_source_type("counted", CountedOptions)
    register_source_type("unchecked")


def test_declared_options_are_accepted() -> None:
    source = SourceConfig(type="counted", options={"number": 7, "colour": ["red"]})
    # The config saves the options as the user wrote them.
    assert source.options == {"number": 7, "colour": ["red"]}
    assert SourceConfig(type="unchecked", options={"anything": 1}).options == {"anything": 1}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"type": "counter"}, 'type: "counter" is not a registered source; did you mean "counted"'),
        ({"type": "counted", "options": {}}, "options: number: this option is missing; it is an option of counted"),
        (
            {"type": "counted", "options": {"number": 7, "colr": 1}},
            'options: "colr" is not an option of counted; did you mean "colour"',
        ),
        (
            {"type": "counted", "options": {"number": "many"}},
            "options: number: .* valid integer.*; it is an option of counted",
        ),
        (
            {"type": "counted", "options": {"number": 1, "colour": {850: float("nan")}}},
            "options: colour is {850: nan}; the config is saved with the run and may hold",
        ),
        ({"path": "a.nc", "options": {"number": 7}}, "options: .* are for a source with a type"),
        ({"path": "a.nc", "type": "counted"}, "exactly one of path .* and type .*; both are given"),
        ({}, "exactly one of path .* and type .*; neither is given"),
        ({"type": "unchecked", "format": "grib"}, "format is only for files; a source with a type has options instead"),
    ],
)
def test_wrong_options_are_refused(source: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SourceConfig.model_validate(source)
