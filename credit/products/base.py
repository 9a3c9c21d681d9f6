"""Base classes and registry of forecast products (``inference.products``).

Shape suffixes: N members or quantiles (1 for a single field), H latitude rows, W longitude columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from credit.config.registry import PRODUCTS
from credit.config.sections.output import ProductSection
from credit.errors import ConfigError, did_you_mean
from credit.forecast.io.archive.base import ForecastArchive
from credit.products.description import FieldInfo, ForecastDescription
from credit.products.section import FieldSection

ProductClass = TypeVar("ProductClass", bound="type[Product]")
# Number of fields in the cache; a field holds all members at one lead time. Several products may need the same field,
# and a sum of 6-hourly fields over a day needs four fields.
_MAX_CACHED_FIELDS = 8


def register_product(name: str, section: type[ProductSection]) -> Callable[[ProductClass], ProductClass]:
    """Return a class decorator that registers a product under ``kind: name``, with the config keys of `section`.

    Args:
        name: value of ``kind`` in a config.
        section: class of the product's config section, a subclass of `ProductSection`.

    Raises:
        ConfigError: if a different class is already registered under the name, or the decorated class is not a subclass
            of `Product`.
    """

    def register(cls: ProductClass) -> ProductClass:
        return PRODUCTS.register(name, section, Product, ProductSection)(cls)

    return register


@dataclass(frozen=True)
class ProductContext:
    """Information from which a product is built, in addition to its config section.

    Attributes:
        forecasts: description of the forecasts.
        key: config key of the product, for messages, such as ``inference.products.0``.
        products: name -> product, for all products that are listed before the product to build.
        land_HW: land fraction (0 to 1) from which maps draw the coastline; None for maps without a coastline.
    """

    forecasts: ForecastDescription
    key: str
    products: Mapping[str, Product] = field(default_factory=dict)
    land_HW: np.ndarray | None = None

    def find_field(self, name: str, key: str = "of") -> FieldInfo:
        """Return the description of a channel of the forecasts, or of a field product that is listed earlier.

        Args:
            name: name of the channel or product.
            key: key of the product's section that contains `name`, for the message.

        Raises:
            ConfigError: if no channel and no earlier field product has the name.
        """
        product = self.products.get(name)
        if isinstance(product, FieldProduct):
            return product.info
        if name in self.forecasts.fields:
            return self.forecasts.fields[name]
        choices = [*self.forecasts.fields]
        choices += [other for other, product in self.products.items() if isinstance(product, FieldProduct)]
        raise ConfigError(
            f'{self.key}.{key}: "{name}" is neither a variable of the forecasts nor an earlier product that is a field'
            f"{did_you_mean(name, choices)}"
        )


class FieldReader:
    """Reader of the channels of one forecast, which also computes the products that are fields.

    Args:
        archive: reader of the forecasts.
        initial_minutes: initial time in minutes.
        products: name -> product.
    """

    def __init__(self, archive: ForecastArchive, initial_minutes: int, products: Mapping[str, Product]) -> None:
        self._archive = archive
        self._initial_minutes = initial_minutes
        self._products = products
        self._read_cached = lru_cache(maxsize=_MAX_CACHED_FIELDS)(self._read)

    def read(self, name: str, lead_index: int) -> np.ndarray:
        """Return a field at a lead time, (N, H, W) float32, NaN where missing. The caller must not change the array.

        Args:
            name: name of a channel or of a product.
            lead_index: index of the lead time.

        Raises:
            DataError: if the forecast cannot be read.
        """
        return self._read_cached(name, lead_index)

    def _read(self, name: str, lead_index: int) -> np.ndarray:
        product = self._products.get(name)
        if isinstance(product, FieldProduct):
            return product.compute(self, lead_index).astype(np.float32, copy=False)
        return self._archive.read_channel(self._initial_minutes, lead_index, name)


@dataclass(frozen=True)
class ProductCase:
    """Forecast from one initial time, from which products are made.

    Attributes:
        initial_minutes: initial time in minutes.
        folder: existing folder in which the files of the products are written.
        forecasts: description of the forecasts.
        fields: reader of the fields.
        attributes: global attributes of the forecast, which identify the run.
    """

    initial_minutes: int
    folder: Path
    forecasts: ForecastDescription
    fields: FieldReader
    attributes: Mapping[str, Any]

    @property
    def initial_text(self) -> str:
        """Initial time as a string, ``YYYY-MM-DDTHH:MM``."""
        return self.forecasts.calendar.format(self.initial_minutes)

    def valid_text(self, lead_minutes: int) -> str:
        """Return the valid time at a lead time (in minutes) as a string, ``YYYY-MM-DDTHH:MM``."""
        return self.forecasts.calendar.format(self.initial_minutes + lead_minutes)


class ProductOutput(ABC):
    """Base class of the writers of one product's files for one forecast, lead time by lead time."""

    @abstractmethod
    def add(self, lead_index: int) -> None:
        """Add a lead time to the files. The method is called for every lead time, in increasing order.

        Raises:
            DataError: if the forecast cannot be read.
            CreditError: if a file cannot be written.
        """

    @abstractmethod
    def finish(self) -> list[Path]:
        """Complete the files after the last lead time, and return their paths.

        Raises:
            CreditError: if a file cannot be written.
        """

    def discard(self) -> None:
        """Remove incomplete files after an error. The base class does nothing."""
        return


class Product(ABC):
    """Base class of products.

    A product is built once for all forecasts of a run. The constructor checks the section against the forecasts.

    Args:
        section: config section of the product.
        context: description of the forecasts and the products that are listed earlier.

    Attributes:
        section: config section of the product.
        inputs: names of the channels and products from which the product is made; a subclass sets this attribute.

    Raises:
        ConfigError: if a variable is missing or has unsuitable units, or if the product needs ensemble members and the
            forecasts have none; the message names the config key.
    """

    inputs: tuple[str, ...] = ()

    def __init__(self, section: ProductSection, context: ProductContext) -> None:
        self.section = section
        if section.name in context.forecasts.fields:
            raise ConfigError(
                f'{context.key}.name: "{section.name}" is a variable of the forecasts; choose another name'
            )

    @property
    def name(self) -> str:
        """Name of the product."""
        return self.section.name

    def settings(self) -> dict[str, Any]:
        """Return the settings of the product, as JSON values; the product is made again if they change."""
        return self.section.model_dump(mode="json")

    @abstractmethod
    def open(self, case: ProductCase) -> ProductOutput:
        """Return a writer of the files of this product for one forecast.

        Args:
            case: the forecast.
        """


class FieldProduct(Product):
    """Base class of products that are fields on the grid of the forecasts; other products can use these fields.

    Attributes:
        info: description of the field; a subclass sets this attribute.
    """

    info: FieldInfo

    @property
    def is_written(self) -> bool:
        """True if the field is written to a netCDF file; False if only other products use it."""
        return not isinstance(self.section, FieldSection) or self.section.write

    @abstractmethod
    def compute(self, fields: FieldReader, lead_index: int) -> np.ndarray:
        """Return the field at a lead time, (N, H, W), NaN where missing.

        Args:
            fields: reader of the inputs.
            lead_index: index of the lead time.
        """

    def open(self, case: ProductCase) -> ProductOutput:
        """Return a writer of the netCDF file of the field for one forecast."""
        # Import here, because `credit.products.netcdf` imports this module.
        from credit.products.netcdf import FieldFile

        return FieldFile(self.name, self.info, case)


def derive_info(info: FieldInfo, name: str, **changes: Any) -> FieldInfo:
    """Return the description of a field that is derived from an input field.

    Args:
        info: description of the input field.
        name: name of the derived field.
        changes: attributes of the derived field that differ from the attributes of `info`.
    """
    return replace(info, name=name, **changes)
