"""Transforms are what numpy says, can be undone, keep signs, and statistics and stores know of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from credit.channels import ChannelMap
from credit.config.sections.data import DataConfig, TransformConfig
from credit.data.transforms import apply_transform, invert_transform, transform_channels

LOG, ROOT = TransformConfig(kind="log1p", unit=0.01), TransformConfig(kind="sqrt", unit=4.0)
VALUES = np.array([-2.0, -1e-6, 0.0, 1e-6, 0.01, 3.0, 250.0])


def test_values_by_hand() -> None:
    assert apply_transform(VALUES, LOG)[4:] == pytest.approx([np.log(2), np.log(301), np.log(25001)])
    assert apply_transform(VALUES, ROOT)[[0, 5]] == pytest.approx([-(0.5**0.5), 0.75**0.5])


@pytest.mark.parametrize("transform", [LOG, ROOT])
def test_can_be_undone(transform: TransformConfig) -> None:
    assert invert_transform(apply_transform(VALUES, transform), transform) == pytest.approx(VALUES, rel=1e-12)
    single = torch.from_numpy(VALUES).float()
    assert torch.allclose(invert_transform(apply_transform(single, transform), transform), single, rtol=1e-5)
    assert apply_transform(single, transform).numpy() == pytest.approx(apply_transform(VALUES, transform), rel=1e-6)
    assert (np.diff(apply_transform(VALUES, transform)) > 0).all()
    least = torch.tensor(-torch.inf)
    assert apply_transform(least, transform) == least


def test_only_named_variables_change() -> None:
    variables = {"prognostic": {"vars_3D": ["q"], "vars_2D": ["t2m"]}, "diagnostic": {"vars_3D": [], "vars_2D": ["tp"]}}
    channels = ChannelMap.build(variables, [850, 500]).time_varying_stored
    fields = np.random.default_rng(0).gamma(1.0, 1.0, (4, 3, 5)).astype(np.float32)
    before = fields.copy()
    changed = transform_channels(fields, channels, {"q": ROOT, "tp": LOG})
    assert np.array_equal(changed[2], fields[2])
    assert np.array_equal(fields, before)
    assert changed[:2] == pytest.approx(np.sqrt(before[:2] / 4), rel=1e-6)
    assert changed.dtype == np.float32
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
def test_impossible_transforms(transforms: dict, says: str) -> None:
    period = {"train": ["2000-01-01", "2000-01-31"], "valid": ["2000-03-01", "2000-03-02"],
              "test": ["2000-05-01", "2000-05-02"]}  # fmt: skip
    variables = {"prognostic": {"vars_2D": ["t2m"]}, "dynamic_forcing": {"vars_2D": ["sin_year"]}}
    with pytest.raises(ValueError, match=says):
        DataConfig.model_validate(
            {"sources": [{"path": "x.nc"}], "variables": variables, "splits": period, "transforms": transforms}
        )
