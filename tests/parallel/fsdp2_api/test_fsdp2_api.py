"""credit.parallel.fsdp2 as other programs call it: all cases run in one launch of four ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.parallel.forked import launch
from tests.parallel.fsdp2_api import (  # noqa: F401 (they add their cases)
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
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """The first rank's problem of every case, None where there is none."""
    folder: Path = tmp_path_factory.mktemp("api")
    file, launch_problem = folder / "verdicts.json", None
    try:
        launch("tests.parallel.fsdp2_api.worker", 4, str(folder))
    except AssertionError as error:
        launch_problem = f"no rank got so far: {error}"
    reported = json.loads(file.read_text()) if file.exists() else {}
    return {name: reported.get(name, launch_problem) for name in CASES} | {"the end": launch_problem}


@pytest.mark.parametrize("name", [*CASES, "the end"])
def test_on_four_ranks(name: str, verdicts: dict[str, str | None]) -> None:
    assert verdicts[name] is None, verdicts[name]
