"""credit.parallel.fsdp2 as other programs call it, on four ranks; one launch, one verdict a case."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.parallel import api_state_cases  # noqa: F401 (adds its cases)
from tests.parallel.api_cases import CASES
from tests.parallel.grid import launch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """What every case that was reached said: None, or the first rank's problem; why the others were not reached."""
    folder: Path = tmp_path_factory.mktemp("api")
    reached, end = folder / "verdicts.json", ""
    try:
        launch("tests.parallel.api_worker", 4, str(folder))
    except AssertionError as error:
        end = str(error)
    found = json.loads(reached.read_text()) if reached.exists() else {}
    return {name: found.get(name, f"not reached: {end}" if name not in found else None) for name in CASES}


@pytest.mark.parametrize("name", list(CASES))
def test_on_four_ranks(name: str, verdicts: dict[str, str | None]) -> None:
    assert verdicts[name] is None, verdicts[name]
