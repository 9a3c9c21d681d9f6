"""report.html: one self-contained file with the scores, the figures and what they rest on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from credit import __version__
from credit.config import Config, dump_config
from credit.data.reader import FieldReader
from credit.data.splits import SPLITS
from credit.forecast.forecasts import Forecasts
from credit.verify.facts import describe_data, describe_grid, describe_truth, prescribed_forcing, read_training_log
from credit.verify.page import embed, render, write_page
from credit.verify.plots import label
from credit.verify.scoring import Verification
from credit.verify.seasons import ALL
from credit.verify.table import WIND, ScoreTable

_BETTER, _WORSE = (0, 114, 178), (213, 94, 0)
_Cell = tuple[str, str]  # text, colour
_FULL_COLOUR_AT = 0.6  # the ratio's distance from 1 at which a cell has its full colour


def write_report(
    config: Config,
    found: Verification,
    reader: FieldReader,
    archive: Forecasts,
    figures: Sequence[tuple[str, Path]],
    folder: Path,
) -> Path:
    """Write ``report.html`` into `folder`, replaced whole.

    Args:
        config: the run's config.
        found: the scores.
        reader: the data.
        archive: the model's forecasts.
        figures: (caption, path of a PNG).
        folder: the run's folder.

    Raises:
        CreditError: if it cannot be written.
    """
    text = render(
        "report.html.j2",
        title=config.experiment,
        version=__version__,
        notices=_notices(found, archive),
        data_notes=describe_data(config.data),
        facts=_facts(config, found, reader, archive, folder),
        leads=[f"{hours:g} h" for hours in found.table.shown_leads()],
        scorecard=_scorecard(found.table),
        significance=found.table.explain_significance(),
        parts=_parts(found.table, found.figure_channels),
        forecasts=[label(name) for name in found.table.forecasts],
        scores=_scores(found.table),
        winds=_winds(found.table),
        figures=embed(figures),
        config=dump_config(config),
    )
    return write_page(folder / "report.html", text)


def _notices(found: Verification, archive: Forecasts) -> list[str]:
    notices = []
    prescribed = prescribed_forcing(archive.attributes)
    if prescribed:
        notices.append(
            f"Prescribed forcing: {', '.join(prescribed)} was read from the analysed future, which a real forecast "
            "does not have."
        )
    if found.climatology.notice:
        notices.append(found.climatology.notice)
    if found.left_out:
        notices.append(
            f"{found.left_out} of the forecasts were left out: the test period lacks truth at one of their lead times, "
            "or another forecast that is scored lacks them."
        )
    return notices


def _facts(
    config: Config, found: Verification, reader: FieldReader, archive: Forecasts, folder: Path
) -> list[tuple[str, str]]:
    """Return what the scores rest on as (name, value)."""
    attributes, splits = archive.attributes, config.data.splits
    facts = [("Model", config.model.type)]
    if "parameters" in attributes:
        facts.append(("Parameters", f"{int(attributes['parameters']):,}"))
    if "checkpoint_step" in attributes:
        facts.append(("Checkpoint", f"step {attributes['checkpoint_step']}"))
    if "forcing" in attributes:
        facts.append(("Forcing in the forecast", str(attributes["forcing"])))
    log = read_training_log(folder / "metrics.jsonl")
    if log is not None:
        step, loss = log.train[-1]
        facts.append(("Training", f"{step} steps, last loss {loss:.4g}"))
        if log.valid:
            best = min(log.valid, key=lambda row: row[1])
            facts.append(("Validation loss", f"lowest {best[1]:.4g} at step {best[0]}"))
    facts += [(f"{name.capitalize()} period", " to ".join(getattr(splits, name))) for name in SPLITS]
    leads = found.table.lead_hours
    return facts + [
        ("Truth", describe_truth(config.data)),
        ("Grid", describe_grid(reader.grid)),
        ("Time step", config.data.timestep),
        ("Cases", f"{found.table.n_cases} initial times, {found.table.dataset.attrs['initial_times']}"),
        ("Hours of the initial times", f"{found.table.dataset.attrs['initial_hours']} UTC"),
        ("Lead times", f"{leads[0]:g} h to {leads[-1]:g} h"),
        ("Climatology", found.climatology.description),
        ("Damped persistence", "climatology plus r(lead) times the anomaly, r fitted on the training period"),
    ]


def _scorecard(table: ScoreTable) -> list[tuple[str, list[_Cell]]]:
    """Return (channel, [(ratio, colour) by lead]): the model's RMSE over the best baseline's, * if significant."""
    rows = []
    for channel in table.channels:
        stars = ["*" if star else "" for star in table.compared("significant", channel)]
        cells = []
        for hours in table.shown_leads():
            ratio = table.skill(channel, hours)
            cells.append((f"{_number(ratio, '.2f')}{stars[table.lead_hours.index(hours)]}", _colour(ratio)))
        rows.append((channel, cells))
    return rows


def _parts(table: ScoreTable, channels: Sequence[str]) -> tuple[list[str], list[tuple[str, str, list[_Cell]]]]:
    """Return the names of regions and, where there are several, seasons, and (channel, lead, [(ratio, colour)])."""
    seasons = table.seasons[1:] if len(table.seasons) > 2 else []
    parts = [(region, ALL) for region in table.regions] + [("global", season) for season in seasons]
    rows = []
    for channel in channels:
        for hours in table.shown_leads():
            ratios = [table.skill(channel, hours, *part) for part in parts]
            rows.append((channel, f"{hours:g} h", [(_number(ratio, ".2f"), _colour(ratio)) for ratio in ratios]))
    return [label(name) for name in table.regions] + seasons, rows


def _colour(ratio: float) -> str:
    red, green, blue = _BETTER if ratio < 1 else _WORSE
    share = min(abs(1.0 - ratio) / _FULL_COLOUR_AT, 1.0) if ratio == ratio else 0.0
    return f"rgba({red},{green},{blue},{0.65 * share:.2f})"


def _scores(table: ScoreTable) -> list[tuple[str, str, str, list[str], list[str]]]:
    """Return (channel, units, lead, RMSE by forecast, ACC by forecast)."""
    return [
        (
            channel,
            table.units(channel),
            f"{hours:g} h",
            [_number(table.value(name, channel, hours)) for name in table.forecasts],
            [_number(table.value(name, channel, hours, "acc"), ".3f") for name in table.forecasts],
        )
        for channel in table.channels
        for hours in table.shown_leads()
    ]


def _winds(table: ScoreTable) -> list[tuple[str, str, list[str]]]:
    """Return (wind, lead, vector RMSE by forecast)."""
    data = table.dataset
    if WIND not in data:
        return []
    rows = []
    for number in range(data.sizes["wind"]):
        level = float(data["wind_level"].values[number])
        name = str(data["wind_variable"].values[number]) + ("" if level != level else f" {level:g}")
        for hours in table.shown_leads():
            values = data[WIND].isel(wind=number).sel(lead=hours, region="global", season=ALL).values
            rows.append((name, f"{hours:g} h", [_number(value) for value in values]))
    return rows


def _number(value: float, form: str = ".4g") -> str:
    return "" if value != value else format(value, form)
