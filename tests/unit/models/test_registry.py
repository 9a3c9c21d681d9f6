"""The registry of models."""

from __future__ import annotations

import pytest
from torch import nn

from credit.errors import ConfigError
from credit.models import build_model, model_class, model_names, register_model, registry
from credit.models.wxformer import WXFormer


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    model_names()
    monkeypatch.setattr(registry, "_MODELS", dict(registry._MODELS))


def test_models_of_the_package_are_found_without_an_import() -> None:
    assert "wxformer" in model_names()
    assert model_class("wxformer") is WXFormer


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r'model\.type: \'wxfromer\' is not a model; did you mean "wxformer"\?'):
        build_model("wxfromer")


def test_a_class_from_elsewhere_registers_by_decorator() -> None:
    @register_model("twice")
    class Twice(nn.Module):
        def __init__(self, *, factor: int) -> None:
            super().__init__()
            self.factor = factor

    assert "twice" in model_names()
    assert build_model("twice", factor=2).factor == 2
    with pytest.raises(ConfigError, match="'twice'.*is taken by"):
        register_model("twice")(WXFormer)
