"""Summary of scores on a terminal: a table of global RMSE that marks significant differences."""

from __future__ import annotations

import math

from credit.cli.console.terminal import colorize, format_table, wrap_text
from credit.config.sections.verification import BEST_BASELINE
from credit.verify.table.summary import headline_channels, summarize, summary_forecasts
from credit.verify.table.table import ScoreTable

# Longer forecast names are shortened, so that the table is not wider than a terminal.
_MAX_NAME_LETTERS = 20


def format_summary(table: ScoreTable, reference: str | None = None, show_all: bool = False) -> str:
    """Return the summary of a table of scores as text.

    Each row describes one channel at one lead time. It contains the global RMSE of each forecast in the units of the
    channel, and the RMSE of the model divided by the RMSE of the reference. The last column is n_eff, the effective
    number of independent initial times.

    Args:
        table: the scores.
        reference: name of the forecast with which the model is compared; None for the best baseline.
        show_all: True to show all channels, False to show the headline channels.
    """
    # Choose the columns and rows.
    forecasts = summary_forecasts(reference)
    names = {name: _shorten_forecast_name(table, name) for name in forecasts}
    model = table.display_name("model")
    opponent = "the best of the three baselines"
    if reference is not None:
        opponent = table.display_name(reference)
    channels = table.channels if show_all else headline_channels(table)

    # The table has one row for each channel and lead time.
    header = ["channel", "units", "lead", *names.values(), "ratio", "n_eff"]
    cells = []
    previous_channel = None
    for row in summarize(table, channels, table.summary_leads(), reference):
        # The space keeps the decimal points of all rows aligned.
        marker = "*" if row.significant else " "
        ratio = _format_number(row.ratio, ".2f") + marker
        if row.significant:
            # Only significant differences are coloured. A ratio below 1 means that the model is better.
            color = "green" if row.ratio < 1 else "red"
            ratio = colorize(ratio, color)
        # The channel name is printed only in the row of its first lead time.
        label = [row.channel, row.units]
        if row.channel == previous_channel:
            label = ["", ""]
        previous_channel = row.channel
        scores = [_format_number(row.rmse[name], ".4g") for name in forecasts]
        cells.append([*label, f"{row.lead_hours:g} h", *scores, ratio, _format_number(row.n_eff, ".0f")])

    # Build the sentences above and below the table.
    score = "RMSE"
    num_members = 1
    if "members" in table.dataset:
        num_members = int(table.forecast_attribute("members", "model"))
    if num_members > 1:
        score = f"RMSE of the mean of {num_members} members (spread and CRPS are in scores.csv and in the report)"
    lines = [
        wrap_text(f"{score}, global, {table.n_cases} initial times. Ratio: {model} / {opponent}."),
        format_table(header, cells, right_aligned=header[2:]),
    ]
    num_hidden = len(table.channels) - len(channels)
    if num_hidden:
        noun = "channel" if num_hidden == 1 else "channels"
        lines.append(wrap_text(f"{num_hidden} more {noun}: see --all, scores.csv or the report."))
    lines.append(wrap_text(table.describe_significance(reference or BEST_BASELINE)))
    for warning in table.warnings():
        lines.append(colorize(wrap_text(warning), "yellow"))
    return "\n".join(lines)


def _shorten_forecast_name(table: ScoreTable, forecast: str) -> str:
    """Return the name of a forecast for the header of the table, shortened to at most 20 characters."""
    if forecast == "damped_persistence":
        return "Damped"
    return table.display_name(forecast)[:_MAX_NAME_LETTERS]


def _format_number(value: float, format_spec: str) -> str:
    """Return a number as a formatted string; a hyphen for NaN.

    Args:
        value: the number; NaN if it is missing.
        format_spec: Python format specification, such as ``.2f``.
    """
    return "-" if math.isnan(value) else format(value, format_spec)
