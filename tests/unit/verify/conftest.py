"""A small run for tests of the verification: fields of waves, and forecasts of them with a known error."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.config import Config, build_config
from credit.forecast.io.forecast_reader import ForecastArchive, open_forecasts
from credit.forecast.io.forecast_writer import ForecastWriter
from credit.forecast.io.schema import OutputFields, OutputOptions
from tests.unit.analytic_reader import AnalyticReader, make_grid

STEP = 360
LEADS = [360, 720, 1440]
VARIABLES = {
    "prognostic": {"vars_3D": ["z", "u", "v"], "vars_2D": ["t2m"]},
    "diagnostic": {"vars_3D": [], "vars_2D": ["tp"]},
    "dynamic_forcing": {"vars_3D": [], "vars_2D": ["sst"]},
}
MODEL_ERROR = 3.0


def make_config(save_loc: Path, **verification: object) -> Config:
    """Return the config of the run, whose splits are times of `make_reader`."""
    return build_config(
        {
            "experiment": "waves",
            "save_loc": str(save_loc),
            "data": {
                "sources": [{"path": "none.nc"}],
                "levels": [500],
                "variables": VARIABLES,
                "variable_options": {"sst": {"missing": "fill_mean"}},
                "splits": {
                    "train": ["2000-01-01", "2000-12-31"],
                    "valid": ["2001-02-01", "2001-02-10"],
                    "test": ["2001-03-01", "2001-03-10"],
                },
            },
            "model": {"type": "wxformer"},
            "trainer": {"max_steps": 1},
            "verification": {"figure_leads": ["6h", "24h"], **verification},
        }
    )


def make_reader(every: int = STEP) -> AnalyticReader:
    """Return a reader of 14 months of an annual cycle with waves that decorrelate within about a day."""
    channels = ChannelMap.build(VARIABLES, [500.0], masked_variables=["sst"])
    grid = make_grid(12, 24)
    calendar = Calendar()
    lon = np.deg2rad(grid.lon)
    shape = np.cos(np.deg2rad(grid.lat))[:, None]

    def compute_field(minutes: int, channel: int) -> np.ndarray:
        annual = 10 * np.cos(2 * np.pi * calendar.year_fraction(np.array(minutes)))
        days = minutes / 1440
        wave = np.cos(3 * lon - 0.9 * days + channel) + np.cos(5 * lon + 1.7 * days)
        return 280 + channel + annual + 5 * shape * wave

    mask = np.zeros(grid.shape, dtype=bool)
    mask[3, 4:8] = True
    times = np.arange(calendar.parse("2000-01-01"), calendar.parse("2001-03-11"), every)
    return AnalyticReader(channels, grid, calendar, times, compute_field, {"sst": mask})


def write_forecasts(
    folder: Path, reader: AnalyticReader, initial: list[str], error: float = MODEL_ERROR, leads: list[int] = LEADS,
    global_attributes: dict[str, str] | None = None, **options: object,
) -> ForecastArchive:  # fmt: skip
    """Write forecasts that are the truth plus `error`, and open them; `options` are those of `OutputOptions`."""
    starts = [reader.calendar.parse(text) for text in initial]
    fields = OutputFields(reader.channels, reader.grid, reader.calendar, reader.attributes, STEP, masks=reader.masks)
    writer = ForecastWriter(
        folder, fields, leads, starts, OutputOptions(**options), global_attributes=global_attributes
    )
    outputs = len(reader.channels.output)
    for start in starts:
        lead_reader = AnalyticReader(
            reader.channels, reader.grid, reader.calendar, [start + lead for lead in leads], reader._function
        )
        writer.write(start, np.stack([lead_reader.read(i)[:outputs] + np.float32(error) for i in range(len(leads))]))
    return open_forecasts(folder)


@dataclass(frozen=True)
class Run:
    """Config, data and forecasts of a run."""

    config: Config
    reader: AnalyticReader
    archive: ForecastArchive
    folder: Path


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Write forecasts from four initial times; the last one has no truth at lead times beyond 6 hours."""
    folder = tmp_path_factory.mktemp("run")
    reader = make_reader()
    initial = ["2001-03-02T00:00", "2001-03-04T06:00", "2001-03-07T12:00", "2001-03-10T12:00"]
    attributes = {"forcing": "sst: observed; sin_year: computed", "parameters": 1234567, "checkpoint_step": 60}
    archive = write_forecasts(folder / "forecasts", reader, initial, global_attributes=attributes)
    return Run(make_config(folder, animate=["t2m"]), reader, archive, folder)
