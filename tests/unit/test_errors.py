"""Hints at names that a user may have meant."""

from __future__ import annotations

import pytest

from credit.errors import did_you_mean


@pytest.mark.parametrize(
    ("name", "choices", "hint"),
    [
        ("z501", ["z850", "z500", "t2m"], '; did you mean "z500"?'),
        ("max_step", ["max_steps", "patience"], '; did you mean "max_steps"?'),
        ("xyz", ["b", "a"], "; choices are a, b"),
        ("xyz", [], ""),
    ],
)
def test_hint_names_the_nearest_or_all_choices(name: str, choices: list[str], hint: str) -> None:
    assert did_you_mean(name, choices) == hint
