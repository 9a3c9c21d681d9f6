"""Tests of `credit.parallel.fsdp2` as other programs call it. All cases run in one launch of four ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.parallel.forked import launch
from tests.parallel.fsdp2_api import (  # noqa: F401 (the modules register their cases)
    clip_cases,
    compile_cases,
    entry_point_cases,
    sharding_cases,
    spectral_norm_cases,
    state_cases,
    tensor_plan_cases,
)
from tests.parallel.fsdp2_api.gradient_cases import CASES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def errors_by_case(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """Name of a case -> error of the lowest rank that failed, or None."""
    folder: Path = tmp_path_factory.mktemp("api")
    file, launch_error = folder / "verdicts.json", None
    try:
        launch("tests.parallel.fsdp2_api.worker", 4, str(folder))
    except AssertionError as error:
        launch_error = f"no rank got so far: {error}"
    reported_errors = json.loads(file.read_text()) if file.exists() else {}
    return {name: reported_errors.get(name, launch_error) for name in CASES} | {"the end": launch_error}


@pytest.mark.parametrize("name", [*CASES, "the end"])
def test_on_four_ranks(name: str, errors_by_case: dict[str, str | None]) -> None:
    assert errors_by_case[name] is None, errors_by_case[name]
