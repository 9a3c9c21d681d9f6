"""Reading of the initial states of forecasts, from the training store or from analysis files.

A forecast reads prognostic variables and dynamic forcing. Diagnostic variables are outputs, and static fields are
stored in the checkpoint, so analysis files need not contain them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from credit.channels import COMPUTED_STATIC, Channel
from credit.config.sections.data import DataConfig
from credit.data.error_collector import ErrorCollector
from credit.data.formats.files import OpenFiles
from credit.data.reader import FieldReader, open_reader
from credit.data.sources.reading.file_reads import read_static_variable
from credit.data.sources.source_index import scan_sources
from credit.data.sources.source_reader import open_sources
from credit.data.store.store_reader import is_store_from_sources
from credit.errors import DataError
from credit.grid import LatLonGrid

logger = logging.getLogger(__name__)


def open_analyses(conf: DataConfig, needs_truth: bool) -> FieldReader:
    """Open the data from which forecasts start.

    If the training store was written from the sources of the config, the store is opened. Otherwise the source files,
    such as the newest analyses, are opened.

    Args:
        conf: the ``data`` section of the config of the run that makes the forecasts.
        needs_truth: True to open all variables, because the forecast will be scored; False to open only the variables
            that a forecast reads. A training store is always opened with all variables.

    Returns:
        A reader of the store or of the sources.

    Raises:
        DataError: if the store is incomplete, or the sources lack variables that a forecast needs.
    """
    if conf.store is not None and is_store_from_sources(conf):
        return open_reader(conf)
    if conf.store is not None:
        reason = "was written from different sources" if Path(conf.store).exists() else "does not exist"
        logger.info("data.store: %s %s; the fields are read from data.sources", conf.store, reason)
    if needs_truth:
        return open_sources(conf)
    return open_sources(select_forecast_inputs(conf))


def select_forecast_inputs(conf: DataConfig, with_static: bool = False) -> DataConfig:
    """Return a copy of the ``data`` section of a config that contains only the variables that a forecast reads.

    Args:
        conf: the ``data`` section, which is not changed.
        with_static: True to keep all static variables; False to keep only computed static variables, such as the
            latitude.
    """
    static = conf.variables.static
    if not with_static:
        # Static fields that are computed, such as the latitude, need no data.
        computed_names = [name for name in static.vars_2D if name in COMPUTED_STATIC]
        static = static.model_copy(update={"vars_3D": [], "vars_2D": computed_names})
    diagnostic = conf.variables.diagnostic.model_copy(update={"vars_3D": [], "vars_2D": []})
    variables = conf.variables.model_copy(update={"diagnostic": diagnostic, "static": static})
    return conf.model_copy(update={"variables": variables})


def read_static_fields(conf: DataConfig, channels: Sequence[Channel], grid: LatLonGrid) -> np.ndarray:
    """Return the static fields of the sources, (C, H, W) float32 in physical units.

    If a field is not in the sources or cannot be read, its values are NaN.

    Args:
        conf: the ``data`` section of the config.
        channels: (C,) the static channels that are read from data.
        grid: grid of the fields.
    """
    fields_CHW = np.full((len(channels), *grid.shape), np.nan, dtype=np.float32)
    files = OpenFiles(conf.sources)
    # A forecast does not need the static variables of the sources, so their problems are collected and not raised.
    source_index = scan_sources(select_forecast_inputs(conf, with_static=True), files, ErrorCollector())
    if source_index is None:
        return fields_CHW
    # Each variable is read once with all its levels; each level is a channel. Fields that cannot be read remain NaN.
    for name in dict.fromkeys(channel.variable for channel in channels):
        rows = [row for row, channel in enumerate(channels) if channel.variable == name]
        file_variables = source_index.file_variables[name]
        if file_variables:
            with suppress(DataError):
                fields_CHW[rows] = read_static_variable(files, name, file_variables[0])
    return fields_CHW
