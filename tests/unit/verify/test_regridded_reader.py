"""Tests of scores on a common grid: regridded fields, and the scoring of regridded forecasts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from credit.data.formats.regrid import Regridder
from credit.errors import DataError
from credit.forecast.io.forecast_reader import open_forecasts
from credit.forecast.io.forecast_writer import ForecastWriter
from credit.forecast.io.schema import OutputFields
from credit.verify.regridded_reader import RegriddedReader
from credit.verify.scorer import Verification, score_forecasts
from tests.unit.analytic_reader import make_grid
from tests.unit.verify.conftest import LEADS, MODEL_ERROR, STEP, Run, make_config, make_reader

COARSE = make_grid(6, 12)
GRID = {"rows": 6, "columns": 12, "poles": False}


def test_fields_and_masks_are_regridded() -> None:
    """A cell of 30 degrees covers two rows, weighted by area, and one column with half of each neighbour."""
    reader = make_reader()
    fields = RegriddedReader(reader, 1, COARSE)
    native = reader.read(5)
    regridded = fields.read(5)
    area = reader.grid.area_weights()
    columns = native[:, :, ::2] / 2 + np.roll(native, 1, axis=2)[:, :, ::2] / 4 + native[:, :, 1::2] / 4
    rows = area[:, :1].reshape(6, 2, 1)
    expected = (columns.reshape(-1, 6, 2, 12) * rows).sum(axis=2) / rows.sum(axis=1)
    stored = [channel.variable for channel in reader.channels.time_varying_stored]
    unmasked_channels = [number for number, name in enumerate(stored) if name != "sst"]
    np.testing.assert_allclose(regridded[unmasked_channels], expected[unmasked_channels], rtol=1e-5)
    assert (np.isnan(regridded[stored.index("sst")]) == fields.masks["sst"]).all()
    assert fields.masks["sst"].any()
    for is_thread_safe in (True, False):
        reader.is_thread_safe = is_thread_safe
        assert RegriddedReader(reader, 1, COARSE).is_thread_safe == is_thread_safe


@pytest.fixture(scope="module")
def verification(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Verification:
    """Score the model on the grid of the data, and the same forecasts stored on the coarse grid."""
    folder = tmp_path_factory.mktemp("coarse")
    reader = run.reader
    starts = [int(minutes) for minutes in run.archive.initial_minutes[:3]]
    fields = OutputFields(reader.channels, COARSE, reader.calendar, reader.attributes, STEP)
    writer = ForecastWriter(folder, fields, LEADS, starts)
    regridder = Regridder(reader.grid, COARSE, "conservative")
    for start in starts:
        writer.write(start, regridder.apply(run.archive.read(start)))
    config = make_config(run.folder, grid=GRID, other_forecasts={"coarse": str(folder)})
    return score_forecasts(config, reader, run.archive)


def test_scores_are_of_the_coarse_fields(run: Run, verification: Verification) -> None:
    table = verification.table
    reader = run.reader
    assert verification.grid.shape == (6, 12)
    assert table.dataset.attrs["grid"].startswith("6 x 12, 30 degrees")
    assert "from 12 x 24" in table.dataset.attrs["grid"]
    regridder = Regridder(reader.grid, COARSE, "conservative")
    area = COARSE.area_weights()
    for number, lead in enumerate(LEADS):
        squares = []
        for initial in verification.cases.tolist():
            later, start = (reader.read(reader.index_of(t))[0] for t in (initial + lead, initial))
            squares.append((area * regridder.apply(later - start).astype(np.float64) ** 2).sum())
        assert table.scores_by_lead("persistence", "z500")[number] == pytest.approx(np.sqrt(np.mean(squares)), rel=1e-4)
        assert table.scores_by_lead("model", "t2m")[number] == pytest.approx(MODEL_ERROR, rel=1e-4)
    native_verification = score_forecasts(make_config(run.folder), reader, run.archive)
    # Averages over cells of 30 degrees remove about half of the power at wavenumber 5.
    assert table.score("climatology", "z500", 6) < 0.9 * native_verification.table.score("climatology", "z500", 6)


def test_forecasts_of_any_grid_are_compared(verification: Verification) -> None:
    for metric in ("rmse", "acc", "activity"):
        for channel in verification.table.channels:
            model, coarse = (verification.table.scores_by_lead(name, channel, metric) for name in ("model", "coarse"))
            np.testing.assert_allclose(model, coarse, rtol=1e-4)


def test_forecasts_on_another_grid_need_a_common_grid(run: Run, tmp_path: Path) -> None:
    reader = run.reader
    start = int(run.archive.initial_minutes[0])
    fields = OutputFields(reader.channels, COARSE, reader.calendar, reader.attributes, STEP)
    writer = ForecastWriter(tmp_path, fields, LEADS, [start])
    writer.write(start, np.zeros((3, len(reader.channels.output), 6, 12), dtype=np.float32))
    with pytest.raises(DataError, match="grid is not the grid of the data.*set verification.grid to regrid both"):
        score_forecasts(make_config(run.folder), reader, open_forecasts(tmp_path))
