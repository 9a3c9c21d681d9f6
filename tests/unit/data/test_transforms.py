"""Tests of the transforms: values, signs, inverse, selection of variables and invalid settings."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from credit.channels import ChannelMap
from credit.config.sections.data import DataConfig, TransformConfig
from credit.data.transforms import apply_transform, invert_transform, transform_channels

LOG, ROOT = TransformConfig(kind="log1p", unit=0.01), TransformConfig(kind="sqrt", unit=4.0)
VALUES = np.array([-2.0, -1e-6, 0.0, 1e-6, 0.01, 3.0, 250.0])


def test_values_equal_closed_forms() -> None:
    assert apply_transform(VALUES, LOG)[4:] == pytest.approx([np.log(2), np.log(301), np.log(25001)])
    assert apply_transform(VALUES, ROOT)[[0, 5]] == pytest.approx([-(0.5**0.5), 0.75**0.5])


@pytest.mark.parametrize("transform", [LOG, ROOT])
def test_inverse_restores_the_values(transform: TransformConfig) -> None:
    assert invert_transform(apply_transform(VALUES, transform), transform) == pytest.approx(VALUES, rel=1e-12)
    single_precision = torch.from_numpy(VALUES).float()
    assert torch.allclose(
        invert_transform(apply_transform(single_precision, transform), transform), single_precision, rtol=1e-5
    )
    assert apply_transform(single_precision, transform).numpy() == pytest.approx(
        apply_transform(VALUES, transform), rel=1e-6
    )
    assert (np.diff(apply_transform(VALUES, transform)) > 0).all()
    negative_infinity = torch.tensor(-torch.inf)
    assert apply_transform(negative_infinity, transform) == negative_infinity


def test_only_named_variables_change() -> None:
    variables = {"prognostic": {"vars_3D": ["q"], "vars_2D": ["t2m"]}, "diagnostic": {"vars_3D": [], "vars_2D": ["tp"]}}
    channels = ChannelMap.build(variables, [850, 500]).time_varying_stored
    fields = np.random.default_rng(0).gamma(1.0, 1.0, (4, 3, 5)).astype(np.float32)
    before = fields.copy()
    transformed = transform_channels(fields, channels, {"q": ROOT, "tp": LOG})
    assert np.array_equal(transformed[2], fields[2])
    assert np.array_equal(fields, before)
    assert transformed[:2] == pytest.approx(np.sqrt(before[:2] / 4), rel=1e-6)
    assert transformed.dtype == np.float32
    assert transform_channels(fields, channels, {}) is fields


@pytest.mark.parametrize(
    ("transforms", "says"),
    [
        ({"rain": {"kind": "log1p"}}, 'transforms names "rain"'),
        ({"sin_year": {"kind": "sqrt"}}, "not read from data"),
        ({"t2m": {"kind": "log1p", "unit": 0.0}}, "unit"),
        ({"t2m": {"kind": "cube"}}, "log1p"),
    ],
)
def test_invalid_transforms_are_refused(transforms: dict, says: str) -> None:
    splits = {"train": ["2000-01-01", "2000-01-31"], "valid": ["2000-03-01", "2000-03-02"],
              "test": ["2000-05-01", "2000-05-02"]}  # fmt: skip
    variables = {"prognostic": {"vars_2D": ["t2m"]}, "dynamic_forcing": {"vars_2D": ["sin_year"]}}
    with pytest.raises(ValueError, match=says):
        DataConfig.model_validate(
            {"sources": [{"path": "x.nc"}], "variables": variables, "splits": splits, "transforms": transforms}
        )
