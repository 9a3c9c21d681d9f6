"""Plan and make the products of forecasts. Existing products with unchanged settings are not made again."""

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

# Name of the file in the folder of each initial time that records the settings of each product.
RECORD = "products.json"
# Folder of the products in the folder of the forecasts.
PRODUCTS_FOLDER = "products"
# A temporary file from a different host is treated as stale if nobody has written to it for this time, in seconds.
_STALE_SECONDS = 86400.0


@dataclass(frozen=True)
class ProductCount:
    """Counts of the products that a call of `make_products` has made or has kept.

    Attributes:
        num_made: number of products that were made.
        num_current: number of existing products that were kept, because settings and forecast were unchanged.
    """

    num_made: int
    num_current: int


def plan_products(
    sections: Sequence[ProductSection],
    forecasts: ForecastDescription,
    key: str = "inference.products",
    land_HW: np.ndarray | None = None,
) -> list[Product]:
    """Build the products of a config and check them against the forecasts.

    Args:
        sections: config sections of the products; a product may use the products that are listed before it.
        forecasts: description of the forecasts.
        key: config key of the list, for messages.
        land_HW: land fraction (0 to 1) from which maps draw the coastline; None for maps without a coastline.

    Raises:
        ConfigError, DataError: if a product cannot be made from the forecasts; the errors of all products are reported
            together.
    """
    collector = ErrorCollector()
    products: dict[str, Product] = {}
    failed: set[str] = set()
    for number, section in enumerate(sections):
        # An error in an input is reported once, not again for each product that needs this input.
        if failed.intersection(_collect_strings(getattr(section, "of", None))):
            failed.add(section.name)
            continue
        failed.add(section.name)
        with collector.collect():
            context = ProductContext(forecasts, f"{key}.{number}", dict(products), land_HW)
            products[section.name] = PRODUCTS.find_class(section.kind)(section, context)
            failed.discard(section.name)
    collector.raise_any()
    return list(products.values())


def _collect_strings(value: object) -> list[str]:
    """Return all strings in nested lists and in the values of mappings."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list):
        return []
    texts = []
    for item in value:
        texts += _collect_strings(item)
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
    """Make the products of complete forecasts.

    The products of one forecast are made together, lead time by lead time, so that each field is read once.

    Args:
        products: products from `plan_products`.
        archive: reader of the forecasts.
        forecasts: description of the forecasts.
        folder: folder of the products, with one subfolder per initial time.
        initial_times: initial times in minutes.
        overwrite: True to make all products again, also those whose settings are unchanged.

    Raises:
        DataError: if a forecast cannot be read.
        CreditError: if a file cannot be written; products that are already complete are kept.
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
                _make_case_products(pending, case, record)
            bar.update()
    return ProductCount(num_made, num_current)


def _create_folder(folder: Path) -> None:
    """Create the folder of an initial time, and remove temporary files that killed processes left in this folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CreditError(
            f"{folder}: cannot be created ({error.strerror}); name a folder that can be written"
        ) from error
    for path in find_stale_files(folder, "*.nc", process_exists, _STALE_SECONDS):
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _make_case_products(products: Sequence[Product], case: ProductCase, record: _ProductRecord) -> None:
    """Make the given products of one forecast, and record each complete product."""
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
    """Record of the products of one forecast: settings, version of the forecast, and files of each product.

    Args:
        folder: folder of the products of the forecast.
        forecast_version: string that changes when the forecast is replaced.
        products: name -> product, for all products.
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
        """Return True if the product exists and was made from the same forecast with the same settings."""
        entry = self._entries.get(item.name)
        if not isinstance(entry, dict):
            return False
        is_same = entry.get("forecast") == self._forecast_version and entry.get("made_by") == self._list_settings(item)
        return is_same and all((self._folder / name).exists() for name in entry["files"])

    def invalidate(self, products: Sequence[Product]) -> None:
        """Mark the recorded products as incomplete, so that they are not current until `add` is called.

        If the run is interrupted, a product may have both old files and files of the new settings or forecast.
        """
        for item in products:
            entry = self._entries.get(item.name)
            if isinstance(entry, dict):
                entry["made_by"] = None
        if self._entries:
            self._write()

    def add(self, item: Product, paths: Collection[Path]) -> None:
        """Record a complete product, and remove files of its earlier version that are no longer part of it."""
        names = [path.name for path in paths]
        earlier = self._entries.get(item.name)
        if isinstance(earlier, dict):
            for name in set(earlier.get("files", ())) - set(names):
                with suppress(OSError):
                    (self._folder / name).unlink(missing_ok=True)
        self._entries[item.name] = {
            "made_by": self._list_settings(item),
            "forecast": self._forecast_version,
            "files": names,
        }
        self._write()

    def _write(self) -> None:
        atomic_write_text(self._folder / RECORD, json.dumps(self._entries, indent=1) + "\n")

    def _list_settings(self, item: Product) -> dict[str, Any]:
        """Return the settings of a product and of all its input products, converted to JSON and back for comparison."""
        inputs = {}
        for name in item.inputs:
            if name in self._products:
                inputs[name] = self._list_settings(self._products[name])
        return json.loads(json.dumps({"settings": item.settings(), "inputs": inputs}))
