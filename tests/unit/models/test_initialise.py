"""Initial values of models from plugins: any kind of layer, any name of a parameter or buffer, and any device."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from credit.config.sections.model import ModelSection
from credit.errors import ConfigError
from credit.models import ForecastModel, ModelSpec, build_model, register_model
from credit.models.initialise import initial_values
from credit.models.layers.spectral_norm import apply_spectral_norm
from credit.parallel.blocks.activation_checkpoint import checkpoint_blocks
from tests.registries import isolate


class Scaled(nn.Module):
    """Module with additional parameters and buffers, none of them called weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.gamma = nn.Parameter(torch.empty(4))
        self.register_buffer("window", torch.empty(3))
        self.register_buffer("count", torch.empty((), dtype=torch.int64))

    def initial_value(self, key: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Return the initial value of a parameter or buffer."""
        if key == "gamma":
            return torch.randn(shape, generator=generator, device="cpu")
        return torch.arange(3.0, device="cpu") if key == "window" else torch.zeros(shape, device="cpu")


def draw_values(model: nn.Module, seed: int = 1) -> dict[str, Tensor]:
    return dict(initial_values(model, seed))


def build_on_meta(build) -> nn.Module:
    with torch.device("meta"):
        return build()


def test_parameters_and_buffers_of_any_name() -> None:
    model = build_on_meta(lambda: nn.Sequential(Scaled(), Scaled()))
    values = draw_values(model)
    assert values.keys() == model.state_dict().keys()
    assert torch.equal(values["0.window"], torch.arange(3.0))
    assert not torch.equal(values["0.gamma"], values["1.gamma"]), "each is drawn from its own name"
    assert torch.equal(values["1.gamma"], draw_values(nn.Sequential(nn.Identity(), Scaled()))["1.gamma"])


def test_checkpointing_does_not_change_names_or_initial_values() -> None:
    """The names of initial values omit the path components of wrappers, so a wrapper changes no value."""
    model = nn.Sequential(Scaled(), nn.Linear(4, 4))
    plain_values = draw_values(model)
    model[0]._fsdp2_shard = model[1]._fsdp2_shard = True
    checkpoint_blocks(model)
    wrapped_values = draw_values(model)
    assert wrapped_values.keys() == plain_values.keys() == model.state_dict().keys()
    assert all(torch.equal(value, plain_values[name]) for name, value in wrapped_values.items())


KINDS = {
    "rms": lambda: nn.RMSNorm(8),
    "prelu": lambda: nn.PReLU(3),
    "embedding": lambda: nn.Embedding(300, 40),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "conv1d": lambda: nn.Conv1d(6, 50, 3),
    "conv3d": lambda: nn.Conv3d(2, 50, (1, 3, 3)),
    "gru": lambda: nn.GRU(5, 16),
    "norm": lambda: nn.InstanceNorm2d(3, affine=True),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_torch_start_as_torch_says(name: str) -> None:
    """Moments and constants are those of torch. The global random state does not change."""
    before = torch.get_rng_state()
    model = build_on_meta(lambda: nn.Sequential(KINDS[name](), KINDS[name]()))
    values = draw_values(model)
    assert torch.equal(torch.get_rng_state(), before)
    torch_state = nn.Sequential(KINDS[name](), KINDS[name]()).state_dict()
    assert values.keys() == torch_state.keys()
    for key, value in values.items():
        assert (
            value.shape == torch_state[key].shape and value.dtype == torch_state[key].dtype and value.isfinite().all()
        )
        if name in ("rms", "prelu", "norm"):
            assert torch.equal(value, torch_state[key]), "these start as constants"
    for key in ("weight", "weight_ih_l0", "in_proj_weight"):
        if f"0.{key}" in values and name not in ("rms", "prelu", "norm"):
            drawn_value, torch_value = values[f"0.{key}"], torch_state[f"0.{key}"]
            assert (
                math.isclose(drawn_value.std(), torch_value.std(), rel_tol=0.25)
                and abs(drawn_value.mean()) < 0.2 * drawn_value.std()
            )
            assert not torch.equal(drawn_value, values[f"1.{key}"]), "each is drawn from its own name"
            assert torch.equal(drawn_value, draw_values(model)[f"0.{key}"])
            assert not torch.equal(drawn_value, draw_values(model, seed=2)[f"0.{key}"])


def test_modules_without_initial_values_are_named() -> None:
    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.empty(2))

    class Half(Silent):
        def reset_parameters(self) -> None:
            """Leave gamma unset."""

    for kind in (Silent, Half):
        with pytest.raises(ConfigError, match=rf"model\.type: 1 \({kind.__name__}\).*gamma.*initial_value"):
            draw_values(nn.Sequential(nn.Linear(1, 1), kind()))
    for norm in (nn.BatchNorm2d(2), nn.InstanceNorm2d(2, track_running_stats=True)):
        with pytest.raises(ConfigError, match=rf"0 \({type(norm).__name__}\).*GroupNorm"):
            draw_values(nn.Sequential(norm))


class Indexed(nn.Linear):
    """Linear layer with a buffer whose dtype has no NaN; `reset_parameters` sets the buffer only if `sets` is True."""

    def __init__(self, dtype: torch.dtype, sets: bool) -> None:
        self.sets = sets
        super().__init__(3, 3)
        self.register_buffer("order", torch.tensor([0, 1, 0]).to(dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the parameters of Linear and, if `sets` is True, the order."""
        super().reset_parameters()
        if self.sets and hasattr(self, "order"):
            self.order.copy_(torch.tensor([0, 1, 0]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_an_index_or_a_mask_is_set_or_named(dtype: torch.dtype) -> None:
    """Only the code of the layer knows the values. With zeros instead, a different model would be trained."""
    with pytest.raises(ConfigError, match=r"model\.type: 0 \(Indexed\): order cannot be initialised.*initial_value"):
        draw_values(build_on_meta(lambda: nn.Sequential(Indexed(dtype, sets=False))))

    class Reads(Indexed):
        def reset_parameters(self) -> None:
            super().reset_parameters()
            if hasattr(self, "order"):
                self.bias.data = self.bias.data[self.order.long()]

    if dtype == torch.int64:
        with pytest.raises(ConfigError, match=r"0 \(Reads\): its reset_parameters reads a tensor.*initial_value"):
            draw_values(nn.Sequential(Reads(dtype, sets=False)))
    values = draw_values(nn.Sequential(Indexed(dtype, sets=True)))
    assert torch.equal(values["0.order"], torch.tensor([0, 1, 0]).to(dtype)) and values["0.weight"].isfinite().all()


@pytest.mark.parametrize(
    "norm", [spectral_norm, parametrizations.spectral_norm, parametrizations.weight_norm, weight_norm]
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_normalisations_of_torch_are_refused(norm) -> None:
    with pytest.raises(ConfigError, match=r"0 \(.*Linear\).*apply_spectral_norm\(model\)"):
        draw_values(nn.Sequential(norm(nn.Linear(3, 2))))
    model = nn.Sequential(nn.Linear(3, 2))
    apply_spectral_norm(model)
    assert draw_values(model).keys() == model.state_dict().keys()


def test_tied_and_complex_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch)
    spec = ModelSpec.from_sizes(image_height=4, image_width=8, in_channels=1, out_channels=1)

    class StrangeSection(ModelSection):
        kind: str

    def build_strange_model(kind: str) -> ForecastModel:
        return build_model(spec, StrangeSection(type="strange", kind=kind))

    @register_model("strange", StrangeSection)
    class Strange(ForecastModel):
        def __init__(self, spec: ModelSpec, section: StrangeSection) -> None:
            super().__init__(spec, section)
            kind = section.kind
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
            if kind == "tied":
                self.b.weight = self.a.weight
            elif kind == "complex":
                self.b.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))
            elif kind == "called twice":
                self.b = nn.Sequential(self.a)

    with pytest.raises(ConfigError, match=r"a\.weight and b\.weight are the same parameter"):
        build_strange_model("tied")
    with pytest.raises(ConfigError, match=r"b\.weight is complex.*view_as_complex"):
        build_strange_model("complex")
    assert draw_values(build_strange_model("called twice")).keys() == {"a.weight", "a.bias"}
