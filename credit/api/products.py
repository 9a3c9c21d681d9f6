"""Function `make_products`, which makes forecast products in Python programs and notebooks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xarray as xr

from credit.api.forecast_archive import DatasetArchive
from credit.config.load import build_section
from credit.forecast.io.forecast_reader import open_forecasts
from credit.products.description import describe_archive
from credit.products.make import make_products as make_planned_products
from credit.products.make import plan_products
from credit.products.section import ProductsFileConfig


def make_products(
    forecasts: str | os.PathLike | xr.Dataset | Sequence[xr.Dataset],
    products: Sequence[Mapping[str, Any]],
    output: str | os.PathLike,
) -> Path:
    """Make products from forecasts, such as probabilities, station values, tracks and maps.

    Args:
        forecasts: dataset that `credit.Model.forecast` returns, a list of these datasets, or the folder or store of
            forecast files.
        products: settings of each product, with the keys of an entry of ``inference.products``, such as
            ``{"kind": "spread", "name": "t2m_spread", "of": "t2m"}``.
        output: folder of the products. It is created if necessary, with one subfolder per initial time.

    Returns:
        The folder of the products.

    Raises:
        ConfigError: if the settings of a product are invalid, or a product cannot be made from the forecasts.
        DataError: if the forecasts cannot be read.
    """
    raw = {"forecasts": "forecasts", "products": [dict(entry) for entry in products]}
    sections = build_section(ProductsFileConfig, raw, "products").products
    is_in_memory = not isinstance(forecasts, str | os.PathLike)
    if isinstance(forecasts, xr.Dataset):
        forecasts = [forecasts]
    archive = DatasetArchive(forecasts, "forecasts") if is_in_memory else open_forecasts(forecasts)
    description = describe_archive(archive)
    planned = plan_products(sections, description, "products")
    folder = Path(output)
    # A change of a dataset in memory cannot be detected, so its products are always made again.
    make_planned_products(planned, archive, description, folder, archive.initial_minutes.tolist(), is_in_memory)
    return folder
