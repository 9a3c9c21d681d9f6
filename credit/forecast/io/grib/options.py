"""Settings of the GRIB2 files of a run, built from the config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from credit.config.sections.data import DataConfig
from credit.config.sections.inference import InferenceConfig
from credit.config.sections.output import GribConfig
from credit.data.sources.levels.hybrid_coefficients import load_coefficients
from credit.physics.vertical import HybridLevels


@dataclass(frozen=True)
class GribOptions:
    """Settings of the GRIB2 files of a run.

    Attributes:
        conf: config section ``inference.grib``.
        model_levels: all levels of the model, with their coefficients; None if they are unknown.
        has_control: True if member 0 of an ensemble is the control forecast.
    """

    conf: GribConfig = GribConfig()
    model_levels: HybridLevels | None = None
    has_control: bool = False


def build_grib_options(inference: InferenceConfig, data: DataConfig) -> GribOptions | None:
    """Build the settings of the GRIB2 files of a run; None if the run writes a different format.

    Args:
        inference: config section ``inference``.
        data: config section ``data``.

    Raises:
        DataError: if the file ``data.coefficients`` cannot be read.
    """
    if inference.format != "grib2":
        return None
    model_levels = None
    # Fields on pressure levels need no coefficients.
    if data.level_units == "model_level" and inference.pressure_levels is None and data.coefficients is not None:
        model_levels = load_coefficients(Path(data.coefficients), "data.coefficients")
    has_control = inference.ensemble is not None and inference.ensemble.control
    return GribOptions(inference.grib, model_levels, has_control)
