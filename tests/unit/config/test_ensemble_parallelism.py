"""Config keys of ensembles whose members are shared among ranks."""

from __future__ import annotations

from importlib.resources import files

import pytest

from credit.config import load_config
from credit.errors import ConfigError

QUICKSTART = str(files("credit.config") / "templates" / "quickstart.yml")
ENSEMBLE = ["model.noise=global", "loss.kind=crps", "trainer.members=4", "inference.batch_size=5"]
FORECASTS = "inference.ensemble={members: 10}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.parallelism.ensemble=3"], "3 ranks cannot share trainer.members 4 evenly"),
        (["trainer.parallelism={ensemble: 2, data: none}"], "ensemble: 2 needs data parallelism"),
        (["inference.parallelism.ensemble=2"], "2 ranks have no members to share"),
        ([FORECASTS, "inference.parallelism.ensemble=3"], "batches of inference.batch_size 5 are too few"),
        (
            ["inference.ensemble={members: 10, lagged: 6h}", "inference.parallelism={ensemble: 2, shard: true}"],
            "lagged members",
        ),
    ],
)
def test_contradictions_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(QUICKSTART, [*ENSEMBLE, *overrides])


def test_valid_degrees_are_accepted() -> None:
    overrides = [FORECASTS, "inference.parallelism.ensemble=2", "trainer.parallelism.ensemble=4"]
    config = load_config(QUICKSTART, [*ENSEMBLE, *overrides])
    assert config.trainer.objective.shares_members
    assert config.inference.parallelism.needs_process_group
    assert not config.inference.parallelism.shares_forecasts


def test_an_objective_that_does_not_share_members_is_refused() -> None:
    """With such an objective, every rank of a group would train the same members."""
    overrides = ["trainer.objective.kind=deterministic", "trainer.parallelism.ensemble=2"]
    with pytest.raises(ConfigError):
        load_config(QUICKSTART, [*ENSEMBLE, *overrides])
