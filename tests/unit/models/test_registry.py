"""The registry of models."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch import nn

from credit.config import registry
from credit.config.sections.loss import LossSection
from credit.config.sections.model import ModelSection
from credit.errors import ConfigError
from credit.models import ForecastModel, ModelSpec, build_model, model_class, model_names, register_model
from credit.models.wxformer import WXFormer
from tests.conftest import REPOSITORY
from tests.registries import REGISTRIES, isolate

SPEC = ModelSpec.from_sizes(image_height=4, image_width=8, in_channels=3, out_channels=2)


class ScaledSection(ModelSection):
    factor: int


@pytest.fixture(autouse=True)
def isolate_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch)


def test_built_in_models_are_known_without_an_import() -> None:
    assert "wxformer" in model_names()
    assert model_class("wxformer") is WXFormer


def test_error_for_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r'model\.type: "wxfromer" is not a model; did you mean "wxformer"\?'):
        build_model(SPEC, ModelSection(type="wxfromer"))


def test_a_plugin_registers_class_and_section_together() -> None:
    @register_model("scaled", ScaledSection)
    class Scaled(ForecastModel):
        def __init__(self, spec: ModelSpec, section: ScaledSection) -> None:
            super().__init__(spec, section)
            self.factor = section.factor

    assert "scaled" in model_names()
    assert registry.MODELS.find_section("scaled") is ScaledSection
    model = build_model(SPEC, ScaledSection(type="scaled", factor=2))
    assert model.factor == 2
    assert model.spec.in_shape == (3, 1, 4, 8)
    with pytest.raises(ConfigError, match='"scaled".*is taken by'):
        register_model("scaled", ScaledSection)(WXFormer)


def test_name_of_a_built_in_model_cannot_be_registered() -> None:
    class Impostor(ForecastModel):
        pass

    with pytest.raises(ConfigError, match='model name "wxformer" .* is taken by credit.models.wxformer.model'):
        register_model("wxformer", ModelSection)(Impostor)


def test_a_class_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'model "plain": .*must derive from credit\.models\.base\.ForecastModel'):
        register_model("plain", ModelSection)(nn.Linear)


def test_the_table_of_built_in_kinds_agrees_with_the_decorators() -> None:
    """The table names the section with which the class is registered. A new process can resolve each name."""
    command = [sys.executable, "-m", "tests.unit.models.check_registry", *(kinds.key for kinds in REGISTRIES)]
    process = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def test_noise_that_a_model_does_not_take_is_refused() -> None:
    @register_model("quiet", ScaledSection)
    class Quiet(ForecastModel):
        pass

    section = ScaledSection(type="quiet", factor=1, noise="global")
    with pytest.raises(
        ConfigError, match=r"model\.noise: global is not supported by model\.type quiet; supported kinds: none"
    ):
        build_model(SPEC, section)


def test_a_section_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'model "plain": .*must derive from credit\.config\.sections\.model'):
        register_model("plain", LossSection)(type("Plain", (ForecastModel,), {}))
