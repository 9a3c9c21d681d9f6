"""Isolation of the registries: what a test registers is forgotten afterwards."""

from __future__ import annotations

import pytest

from credit.config import registry
from credit.metrics import base as metrics

REGISTRIES = (
    registry.MODELS,
    registry.LOSSES,
    registry.OBJECTIVES,
    registry.POSTPROCESSES,
    registry.PERTURBATIONS,
    registry.PRODUCTS,
)


def isolate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every registry a copy of its kinds for the duration of a test."""
    for kinds in REGISTRIES:
        # Kinds that are imported during the test for the first time would be forgotten for good: import them before.
        for name in kinds.names():
            kinds.find_class(name)
        monkeypatch.setattr(kinds, "_classes", dict(kinds._classes))
        monkeypatch.setattr(kinds, "_sections", dict(kinds._sections))
    metrics.find_metric_class("rmse")
    monkeypatch.setattr(metrics, "_METRICS", dict(metrics._METRICS))
