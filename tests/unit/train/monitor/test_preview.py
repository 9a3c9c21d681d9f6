"""Tests of the preview: its scores and figures, and that it does not change the training."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.config.sections.data import DataConfig
from credit.data.normalize import Normalizer
from credit.data.samples.frames import FrameReader
from credit.data.store.statistics import Statistics
from credit.errors import ConfigError, CreditError, DataError
from credit.forecast.stepper import Stepper
from credit.parallel.mesh import DeviceGrid, ParallelDims
from credit.train.monitor.metrics_log import MetricsLog
from credit.train.monitor.preview import Preview, PreviewPlan
from credit.train.monitor.run_files import read_preview_scores
from credit.verify.plots.preview import draw_preview
from tests.unit.analytic_reader import AnalyticReader, make_grid

STEP, LEAD = 360, 1440
GROUPS = {
    "prognostic": {"vars_3D": ["z"], "vars_2D": ["t2m"]},
    "diagnostic": {"vars_3D": [], "vars_2D": ["tp"]},
    "dynamic_forcing": {"vars_3D": [], "vars_2D": ["sin_year"]},
}
CHANNELS = ChannelMap.build(GROUPS, [500.0])
GRID, CALENDAR = make_grid(6, 12), Calendar()
TENDENCY = np.array([3.0, 0.5])
PLOTTED_CHANNELS = ["tp", "t2m", "z500"]
INITIAL = [CALENDAR.parse(f"2001-01-{day:02d}") for day in (2, 4, 7)]
MASK = np.zeros(GRID.shape, dtype=bool)
MASK[2, 3:7] = True


class Network(nn.Module):
    """Network that adds 1.5 tendencies a step, draws random numbers, counts its calls and keeps a tensor."""

    def __init__(self, value: float = 1.5) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))
        self.dropout = nn.Dropout(0.5)
        self.calls = 0
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.kept is None:
            self.kept = torch.ones(x.shape[0], 3, 1, *x.shape[3:]) * 1.0
        return self.dropout(self.value * self.kept)


def compute_field(minutes: int, channel: int) -> np.ndarray:
    """Return a field that differs between times, channels and cells."""
    rows, columns = np.indices(GRID.shape)
    return 100 + 7 * channel + 5 * np.sin(0.9 * columns + 0.3 * rows + minutes / 700 + channel)


def build_preview(network: nn.Module, mesh: DeviceGrid, folder: Path, draw=lambda *_: []) -> Preview:
    periods = {name: ["2001-01-01", "2001-01-10"] for name in ("train", "valid", "test")}
    conf = DataConfig.model_validate(
        {"sources": [{"path": "none.nc"}], "levels": [500], "variables": GROUPS, "splits": periods}
    )
    times = np.arange(CALENDAR.parse("2001-01-01"), CALENDAR.parse("2001-01-10"), STEP)
    reader = AnalyticReader(CHANNELS, GRID, CALENDAR, times, compute_field, {"t2m": MASK})
    zeros, ones = np.zeros(3), np.ones(3)
    tendency = np.append(TENDENCY, 1.0)
    statistics = Statistics(("z500", "t2m", "tp"), 100 + zeros, 4 * ones, zeros, zeros, zeros, tendency, zeros)
    normalizer = Normalizer(CHANNELS, statistics, {"sin_year": (0.0, 1.0)}, {})
    valid = torch.ones(2, *GRID.shape, dtype=torch.bool)
    valid[1] = torch.from_numpy(~MASK)
    stepper = Stepper(network, CHANNELS, normalizer, torch.zeros(0, *GRID.shape), True, valid)
    area = np.stack([GRID.area_weights() * (~MASK if number == 1 else 1.0) for number in range(3)])
    weight = torch.from_numpy(area / area.sum(axis=(1, 2), keepdims=True))
    plan = PreviewPlan(PLOTTED_CHANNELS, INITIAL, LEAD)
    return Preview(plan, stepper, FrameReader(reader, conf, None), conf, weight, mesh, folder, draw)


def compute_expected_scores(initial: list[int]) -> dict[str, float]:
    """Return the scores of the preview, computed by numpy in float64."""
    area, scores = GRID.area_weights(), {}
    for number, name in enumerate(("z500", "t2m", "tp")):
        weight = area * (~MASK if name == "t2m" else 1.0)
        for step in range(1, LEAD // STEP + 1):
            errors = {"rmse": [], "persistence": []}
            for start in initial:
                truth, initial_field = compute_field(start + step * STEP, number), compute_field(start, number)
                model_forecast = (
                    initial_field + 1.5 * TENDENCY[number] * step if number < 2 else np.full(GRID.shape, 100 + 1.5 * 4)
                )
                for kind, forecast in (("rmse", model_forecast), ("persistence", initial_field)):
                    errors[kind].append(((forecast - truth) ** 2 * weight).sum() / weight.sum())
            scores |= {
                f"{kind}/{name}/{6 * step}h": np.sqrt(np.mean(squared_errors))
                for kind, squared_errors in errors.items()
            }
    return scores


def test_scores_are_those_of_numpy(tmp_path: Path) -> None:
    scores = build_preview(Network(), DeviceGrid(), tmp_path).score(lambda: False)
    # Fields are float32, so scores differ in the last digits.
    assert scores == pytest.approx(compute_expected_scores(INITIAL), rel=1e-5)
    assert len(scores) == 2 * 3 * 4


def test_ranks_share_the_cases_and_run_the_same_number_of_forwards(tmp_path: Path) -> None:
    networks = [Network(), Network()]
    scores_by_rank = [
        build_preview(networks[rank], DeviceGrid(ParallelDims(shard=2), rank), tmp_path).score(lambda: False)
        for rank in (0, 1)
    ]
    # The scores are the mean over ranks, which one process does not compute.
    combined_scores = {
        key: np.sqrt((scores_by_rank[0][key] ** 2 + scores_by_rank[1][key] ** 2) / 2) for key in scores_by_rank[0]
    }
    assert combined_scores == pytest.approx(compute_expected_scores(INITIAL), rel=1e-5)
    assert [network.calls for network in networks] == [8, 8]


def test_the_preview_does_not_change_the_training(tmp_path: Path) -> None:
    network = Network().train()
    preview = build_preview(network, DeviceGrid(), tmp_path)
    random_states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    first_scores = preview.score(lambda: False)
    assert torch.equal(random_states[0], torch.get_rng_state())
    assert (random_states[1] == np.random.get_state()[1]).all() and random_states[2] == random.getstate()
    assert network.training and network.dropout.training
    assert preview.score(lambda: False) == first_scores
    assert network.value.grad is None
    # The tensor kept since the first forecast can take part in a training step.
    network(torch.zeros(1, 4, 1, *GRID.shape)).square().mean().backward()
    assert network.value.grad is not None


def test_the_preview_stops_between_forecasts_on_request(tmp_path: Path) -> None:
    network, stop_requests = Network().train(), iter([False, True])
    log = MetricsLog(tmp_path, 0, enabled=True)
    assert not build_preview(network, DeviceGrid(), tmp_path)(5, log, lambda: next(stop_requests))
    log.close()
    assert network.calls == 4 and network.training
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_figures_that_cannot_be_written_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def raise_disk_full(*_: object) -> list[Path]:
        raise CreditError("early_rmse.png: cannot be written (No space left on device); is the disk full?")

    log = MetricsLog(tmp_path, 0, enabled=True)
    with caplog.at_level(logging.WARNING):
        assert build_preview(Network(), DeviceGrid(), tmp_path, raise_disk_full)(5, log, lambda: False)
    log.close()
    assert "preview at step 5: not plotted (early_rmse.png: cannot be written (No space" in caplog.text
    assert read_preview_scores(tmp_path)[5] == pytest.approx(compute_expected_scores(INITIAL), rel=1e-5)


def test_figures_are_replaced_and_lose_later_steps_after_a_rewind(tmp_path: Path) -> None:
    steps_drawn: list[list[int]] = []

    def draw(folder: Path, reader: object, history: dict, *rest: object) -> list[Path]:
        steps_drawn.append(sorted(history))
        return draw_preview(folder, reader, history, *rest)

    network = Network()
    preview = build_preview(network, DeviceGrid(), tmp_path, draw)
    log = MetricsLog(tmp_path, 0, enabled=True)
    names = {"early_rmse.png", "early_map_tp.png", "early_map_t2m.png", "early_map_z500.png"}
    pictures = []
    for step in (5, 10, 15):
        assert preview(step, log, lambda: False)
        with torch.no_grad():
            network.value -= 0.5
        assert {path.name for path in (tmp_path / "figures").iterdir()} == names
        pictures.append({name: (tmp_path / "figures" / name).read_bytes() for name in names})
    assert all(pictures[0][name] != pictures[2][name] for name in names)
    log.rewind(5)
    preview(10, log, lambda: False)
    log.close()
    assert steps_drawn == [[5], [5, 10], [5, 10, 15], [5, 10]]


def test_a_diverging_network_has_curves_and_no_map(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = MetricsLog(tmp_path, 0, enabled=True)
    preview = build_preview(Network(torch.inf), DeviceGrid(), tmp_path, draw_preview)
    assert preview(5, log, lambda: False)
    log.close()
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row["early"]["rmse/z500/6h"] is None and row["early"]["persistence/z500/6h"] > 0
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["early_rmse.png"]
    assert "not plotted" not in caplog.text


@pytest.mark.parametrize(
    ("early", "error", "says"),
    [
        ({"channels": ["z50"]}, ConfigError, 'trainer.preview.channels: "z50" is not scored; did you mean "z500"'),
        ({"lead_time": "30d"}, DataError, "trainer.preview.lead_time: 720h: data.splits.valid"),
    ],
)
def test_wrong_channels_and_lead_times_are_refused(early: dict, error: type[Exception], says: str) -> None:
    from credit.config import build_config
    from credit.data.splits import build_splits
    from credit.train.monitor.preview import plan_preview
    from tests.unit.verify.conftest import make_config, make_reader

    reader, raw = make_reader(), make_config(Path("run")).model_dump()
    raw["trainer"]["preview"] = early
    config = build_config(raw)
    with pytest.raises(error, match=says):
        plan_preview(
            config, reader.channels, reader.times, reader.calendar, build_splits(config.data, reader.calendar)["valid"]
        )
