"""Tests that classes without support for divided fields are refused before a run begins."""

from __future__ import annotations

from importlib.resources import files

import pytest

from credit.config import load_config
from credit.config.registry import OBJECTIVES
from credit.errors import ConfigError
from credit.metrics import find_metric_class
from credit.metrics.rmse import RootMeanSquareError
from credit.train.build.domain_support import require_domain_support

QUICKSTART = str(files("credit.config") / "templates" / "quickstart.yml")
DOMAIN = "trainer.parallelism.domain=2"


def test_classes_of_the_package_are_accepted() -> None:
    require_domain_support(load_config(QUICKSTART, [DOMAIN, "model.hyperdiffusion={time: 24h}"]))
    ensemble = ["trainer.members=2", "loss.kind=crps", "model.noise={kind: global}"]
    require_domain_support(load_config(QUICKSTART, [DOMAIN, *ensemble]))


def test_a_subclass_must_declare_its_support_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A metric that takes a square root over a part of the field would be wrong."""

    class DerivedMetric(RootMeanSquareError):
        pass

    monkeypatch.setattr("credit.train.build.domain_support.find_metric_class", lambda name: DerivedMetric)
    config = load_config(QUICKSTART, [DOMAIN])
    with pytest.raises(ConfigError, match="trainer.metrics: rmse does not support domain parallelism"):
        require_domain_support(config)
    # Without divided fields there is nothing to refuse.
    require_domain_support(load_config(QUICKSTART, []))


def test_an_objective_of_a_plugin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OBJECTIVES, "find_class", lambda kind: find_metric_class)
    with pytest.raises(ConfigError, match="trainer.objective.kind: deterministic does not support"):
        require_domain_support(load_config(QUICKSTART, [DOMAIN]))
