"""Plan and make the products of forecasts; products that exist with the same settings are not made again."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from credit.calendar import Calendar
from credit.config.registry import PRODUCTS
from credit.config.sections.output import ProductSection
from credit.data.error_collector import ErrorCollector
from credit.errors import CreditError
from credit.forecast.io.archive.base import ForecastArchive
from credit.products.base import FieldProduct, FieldReader, Product, ProductCase, ProductContext, ProductOutput
from credit.products.description import ForecastDescription
from credit.utils.atomic import atomic_write_text
from credit.utils.progress import ProgressBar
from credit.utils.temporary import find_stale_files, process_exists

# File in the folder of each initial time that says how each product was made.
RECORD = "products.json"
# Folder of the products in the folder of the forecasts.
PRODUCTS_FOLDER = "products"
# A temporary file of another host is stale after this time without writing.
_STALE_SECONDS = 86400.0


@dataclass(frozen=True)
class ProductCount:
    """Numbers of products that a call has made, and that existed already.

    Attributes:
        num_made: number of products that were made.
        num_current: number of products that existed already, with the same settings and of the same forecast.
    """

    num_made: int
    num_current: int


def plan_products(
    sections: Sequence[ProductSection],
    forecasts: ForecastDescription,
    key: str = "inference.products",
    land_HW: np.ndarray | None = None,
) -> list[Product]:
    """Build the products of a config, which checks them against the forecasts.

    Args:
        sections: config sections of the products; a product may use those before it.
        forecasts: description of the forecasts.
        key: config key of the list, for messages.
        land_HW: land fraction (0 to 1) from which maps draw the coastline; None draws none.

    Raises:
        ConfigError, DataError: if a product cannot be made of the forecasts; several errors are reported together.
    """
    collector = ErrorCollector()
    products: dict[str, Product] = {}
    failed: set[str] = set()
    for number, section in enumerate(sections):
        # The error of an input is reported once, not for all products that need it.
        if failed.intersection(_list_texts(getattr(section, "of", None))):
            failed.add(section.name)
            continue
        failed.add(section.name)
        with collector.collect():
            context = ProductContext(forecasts, f"{key}.{number}", dict(products), land_HW)
            products[section.name] = PRODUCTS.find_class(section.kind)(section, context)
            failed.discard(section.name)
    collector.raise_any()
    return list(products.values())


def _list_texts(value: object) -> list[str]:
    """Return all texts in nested lists and mappings."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list):
        return []
    texts = []
    for item in value:
        texts += _list_texts(item)
    return texts


def format_folder_name(calendar: Calendar, initial_minutes: int) -> str:
    """Return the name of the folder of an initial time, such as ``2001-04-01T00``."""
    date = calendar.datetime(initial_minutes)
    return date.strftime("%Y-%m-%dT%H%M" if date.minute else "%Y-%m-%dT%H")


def make_products(
    products: Sequence[Product],
    archive: ForecastArchive,
    forecasts: ForecastDescription,
    folder: Path,
    initial_times: Iterable[int],
    overwrite: bool = False,
) -> ProductCount:
    """Make the products of forecasts that are complete.

    The products of one forecast are made together, lead time by lead time, so that each field is read once.

    Args:
        products: products from `plan_products`.
        archive: reader of the forecasts.
        forecasts: description of the forecasts.
        folder: folder of the products; each initial time gets a folder in it.
        initial_times: initial times in minutes.
        overwrite: True to make products again that exist with the same settings.

    Raises:
        DataError: if a forecast cannot be read.
        CreditError: if a file cannot be written; products that were complete stay.
    """
    times = list(initial_times)
    num_made = 0
    num_current = 0
    written_products = [item for item in products if not isinstance(item, FieldProduct) or item.is_written]
    products_by_name = {item.name: item for item in products}
    with ProgressBar(total=len(times), desc="products", unit="forecast") as bar:
        for initial_minutes in times:
            case_folder = folder / format_folder_name(forecasts.calendar, initial_minutes)
            record = _ProductRecord(case_folder, archive.describe_version(initial_minutes), products_by_name)
            pending = [item for item in written_products if overwrite or not record.is_current(item)]
            num_made += len(pending)
            num_current += len(written_products) - len(pending)
            if pending:
                _create_folder(case_folder)
                fields = FieldReader(archive, initial_minutes, products_by_name)
                case = ProductCase(initial_minutes, case_folder, forecasts, fields, archive.attributes)
                _make_case(pending, case, record)
            bar.update()
    return ProductCount(num_made, num_current)


def _create_folder(folder: Path) -> None:
    """Create the folder of an initial time, and remove temporary files that killed processes have left in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CreditError(
            f"{folder}: cannot be created ({error.strerror}); name a folder that can be written"
        ) from error
    for path in find_stale_files(folder, "*.nc", process_exists, _STALE_SECONDS):
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _make_case(products: Sequence[Product], case: ProductCase, record: _ProductRecord) -> None:
    """Make some products of one forecast."""
    outputs: dict[str, ProductOutput] = {}
    record.invalidate(products)
    try:
        for item in products:
            outputs[item.name] = item.open(case)
        for lead_index in range(len(case.forecasts.lead_minutes)):
            for output in outputs.values():
                output.add(lead_index)
        for item in products:
            record.add(item, outputs[item.name].finish())
    except BaseException:
        for output in outputs.values():
            output.discard()
        raise


class _ProductRecord:
    """Record of the products of one forecast: their settings, the forecast that they were made of, and their files.

    Args:
        folder: folder of the products of the forecast.
        forecast_version: text that changes when the forecast is replaced.
        products: name -> product, of all products.
    """

    def __init__(self, folder: Path, forecast_version: str, products: Mapping[str, Product]) -> None:
        self._folder = folder
        self._forecast_version = forecast_version
        self._products = products
        self._entries: dict[str, Any] = {}
        # Without a readable record, all products are made again.
        with suppress(OSError, ValueError):
            entries = json.loads((folder / RECORD).read_text(encoding="utf-8"))
            if isinstance(entries, dict):
                self._entries = entries

    def is_current(self, item: Product) -> bool:
        """Return True if a product exists that was made of the same forecast with the same settings."""
        entry = self._entries.get(item.name)
        if not isinstance(entry, dict):
            return False
        is_same = entry.get("forecast") == self._forecast_version and entry.get("made_by") == self._describe(item)
        return is_same and all((self._folder / name).exists() for name in entry["files"])

    def invalidate(self, products: Sequence[Product]) -> None:
        """Record that products are being made, so that they are not current until `add`.

        An interruption may leave some files of the new settings or forecast beside files of the old ones.
        """
        for item in products:
            entry = self._entries.get(item.name)
            if isinstance(entry, dict):
                entry["made_by"] = None
        if self._entries:
            self._write()

    def add(self, item: Product, paths: Collection[Path]) -> None:
        """Record a product that is complete, and remove files of its earlier version that it no longer has."""
        names = [path.name for path in paths]
        earlier = self._entries.get(item.name)
        if isinstance(earlier, dict):
            for name in set(earlier.get("files", ())) - set(names):
                with suppress(OSError):
                    (self._folder / name).unlink(missing_ok=True)
        self._entries[item.name] = {
            "made_by": self._describe(item),
            "forecast": self._forecast_version,
            "files": names,
        }
        self._write()

    def _write(self) -> None:
        atomic_write_text(self._folder / RECORD, json.dumps(self._entries, indent=1) + "\n")

    def _describe(self, item: Product) -> dict[str, Any]:
        """Return the settings of a product and of all products that are its inputs, as they are read back from JSON."""
        inputs = {}
        for name in item.inputs:
            if name in self._products:
                inputs[name] = self._describe(self._products[name])
        return json.loads(json.dumps({"settings": item.settings(), "inputs": inputs}))
