"""Tests that the figure of power spectra shows the values of the table, each forecast in its own colour."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from credit.verify.plots.scores import forecast_styles
from credit.verify.plots.spectra import plot_spectra
from credit.verify.scorer import score_forecasts
from tests.unit.verify.conftest import Run, make_config, write_forecasts


def find_curves(axis: Axes) -> dict[str, np.ndarray]:
    """Return colour -> values over wavenumbers of each curve in a panel."""
    return {line.get_color(): np.asarray(line.get_ydata()) for line in axis.lines if len(line.get_ydata()) > 2}


def test_every_forecast_that_has_a_spectrum_is_shown(run: Run, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(0, 3, run.reader.grid.shape)
    write_forecasts(tmp_path / "other", run.reader, ["2001-03-04T06:00"], noise, variables=["t2m"])
    config = make_config(tmp_path, other_forecasts={"other": str(tmp_path / "other")})
    table = score_forecasts(config, run.reader, run.archive).table
    colours = {name: style["color"] for name, style in forecast_styles(table).items()}
    data = table.dataset
    figure = plot_spectra(table, ["z500", "t2m", "no_such_channel"])
    axes = np.array(figure.axes).reshape(3, 2)  # rows: power, ratios at 6 h and 24 h; columns: z500, t2m
    for column, (channel, names) in enumerate({"z500": ["model"], "t2m": ["model", "other"]}.items()):
        upper, *lower = axes[:, column]
        assert upper.get_title() == channel
        channel_data = data.sel(spectrum_channel=channel).isel(wavenumber=slice(1, None))
        shown_curves = find_curves(upper)
        np.testing.assert_array_equal(shown_curves.pop("black"), channel_data["power_truth"].sel(spectrum_lead=24))
        assert set(shown_curves) == {colours[name] for name in names}
        for name in names:
            forecast = channel_data.sel(forecast=name)
            np.testing.assert_array_equal(shown_curves[colours[name]], forecast["power"].sel(spectrum_lead=24))
            for axis, lead in zip(lower, (6, 24), strict=True):
                assert set(find_curves(axis)) == set(shown_curves)
                np.testing.assert_array_equal(
                    find_curves(axis)[colours[name]], forecast["power_ratio"].sel(spectrum_lead=lead)
                )
        # The large ratios of a noisy forecast do not determine the limits of the axis.
        assert all(1.6 <= axis.get_ylim()[1] <= 3.0 for axis in lower)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["Truth", "waves", "other"]


def test_ratios_without_power_in_the_truth_leave_the_default_limits(run: Run, tmp_path: Path) -> None:
    table = score_forecasts(make_config(tmp_path), run.reader, run.archive).table
    table.dataset["power_truth"][:] = 0.0
    table.dataset["power_ratio"][:] = np.nan
    figure = plot_spectra(table, ["t2m"])
    figure.savefig(tmp_path / "spectra.png")
    assert [axis.get_ylim()[1] for axis in figure.axes[1:]] == [1.6, 1.6]
