"""``credit products``: make products from existing forecasts."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit.cli.common import parse_path
from credit.cli.console.terminal import add_quiet_argument

if TYPE_CHECKING:
    import numpy as np

    from credit.forecast.io.archive.base import ForecastArchive

HELP = """Make products from existing forecasts: derived fields, probabilities, station values, cyclone tracks, maps.

CONFIG is the config of a run. The command makes the products in inference.products from the forecasts in
save_loc/forecasts (inference.folder). `credit rollout` makes the same products after the forecasts.

For forecasts without a run, CONFIG is a file with these keys:
  forecasts    folder of forecasts, or a zarr store
  products     the products, as in inference.products
  output       folder of the products (optional)

The files are written to the folder `products` in the folder of the forecasts, in one folder for each initial time.
Existing products of the same forecast with the same settings are kept.

example:
  credit products config.yml
  credit products products.yml forecasts=/archive/2001 --initial-time 2001-04-01"""


@dataclass(frozen=True)
class _ProductRequest:
    """Forecasts, and the products to make from them.

    Attributes:
        archive: reader of the forecasts.
        sections: config sections of the products.
        key: config key of the list of products, for messages.
        folder: folder of the products.
        land_HW: land fraction (0 to 1) from which the coastline of maps is plotted; None for maps without a coastline.
    """

    archive: ForecastArchive
    sections: list[Any]
    key: str
    folder: Path
    land_HW: np.ndarray | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `credit products`: CONFIG, overrides and the options that select the forecasts."""
    parser.add_argument(
        "config", metavar="CONFIG", type=parse_path, help="YAML file of a run, or with forecasts and products"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="replace a key of CONFIG; repeat for several keys"
    )
    parser.add_argument(
        "--initial-time",
        action="append",
        metavar="TIME",
        help="make only the products of the forecast from this time, or `latest`; repeat for several times",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="make all products again, even if they exist with the same settings"
    )
    add_quiet_argument(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Make the products and return the exit status 0.

    Raises:
        ConfigError: if the file or an option is wrong, or a product cannot be made from the forecasts.
        DataError: if the forecasts cannot be read.
    """
    from credit.config.load import read_yaml
    from credit.products.description import describe_archive
    from credit.products.make import make_products, plan_products

    # Only the config of a run has a section `data`.
    is_run = "data" in read_yaml(arguments.config)
    open_forecasts = _read_request_of_run if is_run else _read_request_of_file
    request = open_forecasts(arguments.config, arguments.overrides)
    forecasts = describe_archive(request.archive)
    products = plan_products(request.sections, forecasts, request.key, request.land_HW)
    times = _select_initial_times(request.archive, arguments.initial_time)
    count = make_products(products, request.archive, forecasts, request.folder, times, arguments.overwrite)
    print(f"{count.num_made} products written, {count.num_current} already existed: {request.folder}")
    return 0


def _read_request_of_run(path: str, overrides: list[str]) -> _ProductRequest:
    """Return the forecasts of a run and the products that its config lists.

    Raises:
        ConfigError: if the config is wrong or has no products.
    """
    from credit.cli.products.run_products import load_land_fraction
    from credit.config import load_config
    from credit.errors import ConfigError
    from credit.forecast.io.forecast_reader import open_forecasts
    from credit.products.make import PRODUCTS_FOLDER

    config = load_config(path, overrides)
    if not config.inference.products:
        raise ConfigError(f"inference.products: {path} has no products; add them to this key")
    folder = Path(config.save_loc) / config.inference.folder
    archive = open_forecasts(folder)
    land_HW = load_land_fraction(config, archive.grid)
    products_folder = folder / PRODUCTS_FOLDER
    return _ProductRequest(archive, config.inference.products, "inference.products", products_folder, land_HW)


def _read_request_of_file(path: str, overrides: list[str]) -> _ProductRequest:
    """Return the forecasts and products that a file names, without the config of a run.

    Raises:
        ConfigError: if the file is wrong.
    """
    from credit.cli.products.run_products import read_land_file
    from credit.config.load import apply_overrides, build_file_section, read_yaml
    from credit.data.formats.zarr.remote import is_remote
    from credit.errors import ConfigError
    from credit.forecast.io.archive.zarr_archive import ZarrArchive
    from credit.forecast.io.forecast_reader import open_forecasts
    from credit.products.make import PRODUCTS_FOLDER
    from credit.products.section import ProductsFileConfig

    raw = apply_overrides(read_yaml(path), overrides)
    conf = build_file_section(ProductsFileConfig, raw, path)
    archive = open_forecasts(conf.forecasts, conf.rename, conf.level_units, conf.storage_options)
    if conf.output is not None:
        folder = Path(conf.output)
    elif is_remote(conf.forecasts):
        raise ConfigError(f"output: {conf.forecasts} is a URL; choose a folder on this machine")
    else:
        # Products are not written into a zarr store.
        source = Path(conf.forecasts)
        is_store = isinstance(archive, ZarrArchive) and archive.origin == source
        folder = (source.parent if is_store else source) / PRODUCTS_FOLDER
    land_HW = None if conf.land is None else read_land_file(Path(conf.land), archive.grid)
    return _ProductRequest(archive, conf.products, "products", folder, land_HW)


def _select_initial_times(archive: ForecastArchive, texts: list[str] | None) -> list[int]:
    """Return the initial times in minutes of the forecasts whose products are made.

    Raises:
        ConfigError: if there is no forecast from a requested time.
    """
    from credit.errors import ConfigError, did_you_mean

    available = archive.initial_minutes.tolist()
    if texts is None:
        return available
    times = []
    for text in texts:
        minutes = available[-1] if text == "latest" else archive.calendar.parse(text, "--initial-time")
        if minutes not in available:
            choices = [archive.calendar.format(time) for time in available]
            raise ConfigError(
                f"--initial-time: there is no forecast from {text} in {archive.origin}{did_you_mean(text, choices)}"
            )
        times.append(minutes)
    return times
