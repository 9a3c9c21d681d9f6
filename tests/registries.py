"""Isolation of the registries: kinds that a test registers are removed after the test."""

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
        # A kind whose module is first imported during the test would be lost after it, so import all kinds before.
        for name in kinds.names():
            kinds.find_class(name)
        monkeypatch.setattr(kinds, "_classes", dict(kinds._classes))
        monkeypatch.setattr(kinds, "_sections", dict(kinds._sections))
    metrics.find_metric_class("rmse")
    monkeypatch.setattr(metrics, "_METRICS", dict(metrics._METRICS))
