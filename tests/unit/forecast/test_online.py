"""Forecasts that are computed while they are read, compared with the outputs of their batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.config.sections.data import DataConfig
from credit.config.sections.inference import InferenceConfig
from credit.forecast.io.diagnostics import OutputDiagnostics
from credit.forecast.io.schema import OutputFields
from credit.forecast.online import ForecastBatching, OnlineForecasts
from credit.forecast.rollout import ForecastStart
from tests.unit.analytic_reader import ATTRIBUTES, make_grid

STEP = 360
GRID = make_grid(4, 8)
CHANNELS = ChannelMap.build({"prognostic": {"vars_3D": [], "vars_2D": ["t2m", "tp"]}}, [])


class RecordedNetwork:
    """Replacement for a network that records the requested batches and counts the steps."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[ForecastStart], int]] = []
        self.steps = 0

    def __call__(self, starts: Sequence[ForecastStart], steps: int) -> Iterator[torch.Tensor]:
        self.batches.append((list(starts), steps))
        for number in range(1, steps + 1):
            self.steps += 1
            times = torch.tensor([float(start.analysis_minutes + number * STEP) for start in starts])
            member = torch.tensor([float(start.member) for start in starts])
            yield torch.stack([times, member], dim=1)[:, :, None, None].expand(-1, -1, *GRID.shape)


def build_online_forecasts(
    network: RecordedNetwork,
    members: int | None = None,
    lag: int = 0,
    batch_size: int = 2,
    diagnostics: OutputDiagnostics | None = None,
) -> OnlineForecasts:
    if diagnostics is None:
        fields = OutputFields(CHANNELS, GRID, Calendar(), ATTRIBUTES, STEP)
    else:
        fields = diagnostics.output_fields(GRID, Calendar())
    batching = ForecastBatching(batch_size, members, lag)
    return OnlineForecasts(
        network, fields, [0, 1440, 2880], [720, 1440], batching, origin=Path("checkpoint"),
        attributes={"parameters": 7}, diagnostics=diagnostics,
    )  # fmt: skip


def read_all(forecasts: OnlineForecasts, groups: list[list[int]]) -> dict[tuple[int, int], np.ndarray]:
    """Return (initial time, lead time) -> fields, read lead time by lead time within each group."""
    fields = {}
    for group in groups:
        for lead_index, lead in enumerate(forecasts.lead_minutes.tolist()):
            for initial in group:
                fields[initial, lead] = forecasts.read_members(initial, lead_index)
    return fields


def test_each_batch_runs_once_up_to_the_last_read_lead() -> None:
    network = RecordedNetwork()
    forecasts = build_online_forecasts(network)
    assert forecasts.initial_time_groups() == [[0, 1440], [2880]]
    for (initial, lead), fields in read_all(forecasts, forecasts.initial_time_groups()).items():
        assert fields.shape == (1, 2, *GRID.shape) and (fields[0, 0] == initial + lead).all()
    assert [([start.initial_minutes for start in batch], steps) for batch, steps in network.batches] == [
        ([0, 1440], 4),
        ([2880], 4),
    ]
    network = RecordedNetwork()
    build_online_forecasts(network).read_members(2880, 0)
    assert network.steps == 2


def test_batches_do_not_depend_on_the_times_that_are_read() -> None:
    """An initial time that is not read is also forecast; only its fields at the last lead time are still pending."""
    network = RecordedNetwork()
    forecasts = build_online_forecasts(network)
    read_all(forecasts, [[1440]])
    assert [start.initial_minutes for start in network.batches[0][0]] == [0, 1440]
    assert set(forecasts._pending) == {(0, 1440)}


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
@pytest.mark.parametrize("lag", [0, 720])
def test_members(batch_size: int, lag: int) -> None:
    """Lagged members reach a lead time at different steps, of one batch or of several."""
    forecasts = build_online_forecasts(RecordedNetwork(), members=3, lag=lag, batch_size=batch_size)
    for (initial, lead), fields in read_all(forecasts, forecasts.initial_time_groups()).items():
        assert fields.shape == (3, 2, *GRID.shape)
        assert (fields[:, 0] == initial + lead).all()
        assert fields[:, 1, 0, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_sums_include_all_steps(batch_size: int) -> None:
    """The sums also include steps that are not read, and steps of lagged members before the initial time."""
    data = DataConfig.model_validate({
        "sources": [{"path": "x.nc"}], "levels": [],
        "variables": {"prognostic": {"vars_2D": ["t2m", "tp"]}}, "variable_options": {"tp": {"temporal": "accumulate"}},
        "splits": {name: ["2000-01-01", "2000-02-01"] for name in ("train", "valid", "test")},
    })  # fmt: skip
    conf = InferenceConfig(derive={"total": {"kind": "accumulation", "of": "tp"}})
    variable_attributes = {**ATTRIBUTES, "tp": {**ATTRIBUTES["tp"], "temporal": "accumulate"}}
    mask = np.arange(32).reshape(GRID.shape) > 28
    diagnostics = OutputDiagnostics(
        conf, data, CHANNELS, variable_attributes, np.zeros((0, *GRID.shape), np.float32), 1440, {"tp": mask}
    )
    forecasts = build_online_forecasts(
        RecordedNetwork(), members=3, lag=720, batch_size=batch_size, diagnostics=diagnostics
    )
    assert forecasts.channel_names == ["t2m", "tp", "total"]
    forecasts.join_collectives([720])
    for (_, lead), fields in read_all(forecasts, forecasts.initial_time_groups()).items():
        # At each step, the field of `tp` has the number of the member.
        assert fields[:, 2, 0, 0].tolist() == [lead // STEP * member for member in range(3)]
        # Masked cells are missing, as in forecast files.
        assert np.isnan(fields[:, 1:, mask]).all() and np.isfinite(fields[:, 0]).all()


def test_joining_collectives_takes_as_many_steps() -> None:
    scored, idle = RecordedNetwork(), RecordedNetwork()
    read_all(build_online_forecasts(scored, members=3), [[1440]])
    build_online_forecasts(idle, members=3).join_collectives([720, 1440])
    assert idle.steps == scored.steps == 2 * 4  # two batches


def test_channel_names_and_units() -> None:
    forecasts = build_online_forecasts(RecordedNetwork())
    assert forecasts.channel_names == ["t2m", "tp"] and forecasts.members is None
    assert forecasts.units == {name: ATTRIBUTES[name]["units"] for name in ("t2m", "tp")}
