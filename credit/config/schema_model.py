"""The ``model`` section. Shapes, channel counts and window fits are derived elsewhere, never typed here.

A model of another package registers its section with `register_model_section`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from credit.config.schema_base import Section
from credit.config.schema_data import Duration
from credit.config.schema_postprocess import PostprocessConfig, check_order


class HyperdiffusionConfig(Section):
    """Damping of the shortest waves after each step, in training and in forecasts."""

    time: Duration = Field("3h", description="E-folding time of the shortest wave that the grid carries.")
    order: int = Field(8, ge=2, multiple_of=2, description="Power of the wave number: 8 is the Laplacian's fourth.")


class ModelSection(Section):
    """Keys that every model has."""

    type: str = Field(description="The model's registered name.")
    residual: bool = Field(
        True,
        description="Predict changes: prognostic y = x_last + sigma_tendency * net, diagnostic y = mu + sigma * net.",
    )
    hyperdiffusion: HyperdiffusionConfig | None = Field(
        None, description="Damp the shortest waves of prognostic channels at every step, for runs of weeks."
    )
    postprocess: list[PostprocessConfig] | None = Field(
        None,
        min_length=1,
        description="What the output of every step is made to keep to, in training and in forecasts, in this order: "
        "bounds of variables, then the budgets of dry air, water and energy.",
    )

    @model_validator(mode="after")
    def _postprocess_in_order(self) -> ModelSection:
        check_order(self.postprocess or [])
        return self


class PaddingConfig(Section):
    """Cells added round the grid before the first stage."""

    mode: Literal["earth", "mirror"] = Field("earth", description="`earth` continues across the pole.")
    lat: list[int] | Literal["auto"] = Field("auto", description="[north, south] rows; `auto`: least that fits.")
    lon: list[int] | Literal["auto"] = Field("auto", description="[west, east] columns; `auto`: least that fits.")
    pole: Literal["published", "exact"] = Field(
        "published", description="`exact` changes the sign of wind components across a pole and skips a pole row."
    )


class WXFormerSection(ModelSection):
    """WXFormer: a CrossFormer encoder and a convolutional decoder."""

    type: Literal["wxformer"] = Field(description="The model's registered name.")
    dim: list[int] = Field([32, 64, 128, 256], min_length=4, max_length=4, description="Channels by stage.")
    depth: list[int] = Field([2, 2, 8, 2], min_length=4, max_length=4, description="Transformer layers by stage.")
    dim_head: int = Field(32, gt=0, description="Channels of an attention head.")
    global_window_size: list[int] = Field(
        [8, 4, 2, 1], min_length=4, max_length=4, description="Long-attention window by stage."
    )
    local_window_size: int | list[int] = Field(4, description="Short-attention window, one or by stage.")
    cross_embed_kernel_sizes: list[list[int]] = Field(
        [[4, 8, 16, 32], [2, 4], [2, 4], [2, 4]], min_length=4, max_length=4, description="Embedding kernels by stage."
    )
    cross_embed_strides: list[int] = Field(
        [2, 2, 2, 2], min_length=4, max_length=4, description="Embedding stride by stage."
    )
    attn_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout of attention probabilities.")
    ff_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout in the feed-forward.")
    use_spectral_norm: bool = Field(True, description="Normalise every weight by its spectral norm.")
    interp: bool = Field(True, description="Interpolate bilinearly to the grid where the decoder's output differs.")
    decoder: Literal["pixel_shuffle", "transposed"] = Field("pixel_shuffle", description="Kind of up-sampling.")
    padding: PaddingConfig | None = Field(PaddingConfig(), description="Padding of the sphere; null for none.")
    position_bias_index: Literal["published", "exact"] = Field(
        "published", description="`exact` corrects the lookup that the published weights were trained with."
    )


_SECTIONS: dict[str, type[ModelSection]] = {"wxformer": WXFormerSection}


def register_model_section(name: str, section: type[ModelSection]) -> None:
    """Make ``model.type: name`` be read as `section`."""
    _SECTIONS[name] = section


def model_section(name: str) -> type[ModelSection] | None:
    """Return the section class of model `name`, None where there is none."""
    return _SECTIONS.get(name)


def model_section_names() -> list[str]:
    """Return the names with a section."""
    return sorted(_SECTIONS)
