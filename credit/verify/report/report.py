"""report.html: one self-contained file with the scores, the figures and what they rest on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from credit import __version__
from credit.config import Config, dump_config
from credit.config.schema_verification import BEST_BASELINE
from credit.forecast.forecast_source import ForecastSource
from credit.verify.plots.style import label
from credit.verify.report.html import embed, render, write_page
from credit.verify.report.metadata import TrainingLog, describe_data, describe_truth
from credit.verify.report.reference_scores import comparable, rows_of
from credit.verify.report.report_data import encode, page_scores, superscript_units
from credit.verify.report.score_descriptions import BASELINE_MEANINGS, TERMS
from credit.verify.scorer import Verification
from credit.verify.table.spectra_rows import shortest_third
from credit.verify.table.table import SHORT_WAVES, ScoreTable

_TOLD = (
    ("Run", "experiment"),
    ("Checkpoint step", "checkpoint_step"),
    ("Fingerprint of the weights", "weights"),
    ("Trained and selected on", "seen_periods"),
    ("Members", "members"),
    ("Ensemble", "ensemble"),
    ("Forcing in the forecast", "forcing"),
)
_OF_EVENTS = (("Events", "events"), ("Climate of events and SEEPS", "climate_of_events"))
_DRAWN_IN_THE_PAGE = ("skill", "spread", "scorecard")  # figures that the page would show twice
_LARGEST_ANIMATION = 3_000_000  # bytes of a file that the page holds


def write_report(
    config: Config,
    found: Verification,
    archive: ForecastSource,
    log: TrainingLog | None,
    figures: Sequence[tuple[str, Path]],
    folder: Path,
    notice: str | None = None,
) -> Path:
    """Write ``report.html`` into `folder`, replaced whole.

    Args:
        config: the run's config.
        found: the scores.
        archive: the model's forecasts.
        log: of the model's training.
        figures: (caption, path of a PNG or a GIF).
        folder: where it goes.
        notice: what else a reader is to know.

    Raises:
        CreditError: if it cannot be written.
    """
    against = found.table.dataset.attrs.get("compared_with")
    page, left_out = page_scores(found.table, found.figure_channels[0])
    text = render(
        "report.html.j2",
        title=config.experiment if against is None else f"{config.experiment} against {against}",
        version=__version__,
        cases=f"{found.table.n_cases} forecasts from {found.table.dataset.attrs['initial_times']}",
        notices=[*([notice] if notice else []), *_notices(found)],
        data_notes=describe_data(config.data),
        facts=_facts(config, found, archive, log),
        blurring=_blurring(found),
        hours=found.table.dataset.attrs["initial_hours"],
        published=_published(found, archive),
        packed=encode(page),
        left_out=left_out,
        significance=found.table.explain_significance(against or BEST_BASELINE),
        terms=_terms(page),
        forecasts=[label(name) for name in found.table.forecasts],
        plain=_plain(found.table),
        figures=embed([(caption, path) for caption, path in figures if _is_embedded(path)]),
        animations=_animations(figures),
        config=dump_config(config),
    )
    return write_page(folder / "report.html", text)


def _published(found: Verification, archive: ForecastSource) -> list[tuple[str, str, float, float, float, str]]:
    degrees = 360.0 / found.grid.shape[1]
    return rows_of(comparable(found.table, degrees, found.cases, archive.calendar), found.table)


def _is_embedded(path: Path) -> bool:
    return path.suffix == ".png" and not path.stem.startswith(_DRAWN_IN_THE_PAGE)


def _animations(figures: Sequence[tuple[str, Path]]) -> list[tuple[str, str, str | None, int]]:
    """Return (caption, name, base64, least width) of the animations; None for what would make the page too large."""
    found = []
    for caption, path in figures:
        if path.suffix == ".gif":
            small = path.stat().st_size <= _LARGEST_ANIMATION
            ((_, image, width),) = embed([(caption, path)]) if small else ((caption, None, 0),)
            found.append((caption, path.name, image, width))
    return found


def _notices(found: Verification) -> list[str]:
    notices = found.table.caveats()
    if found.climatology.short_period_warning:
        notices.append(found.climatology.short_period_warning)
    if found.left_out:
        notices.append(
            f"{found.left_out} of the forecasts were left out: the test period lacks truth at one of their lead times, "
            "or another forecast that is scored lacks them."
        )
    return notices


def _facts(
    config: Config, found: Verification, archive: ForecastSource, log: TrainingLog | None
) -> list[tuple[str, str]]:
    """Return what the scores rest on as (name, value)."""
    attributes, splits = archive.attributes, config.data.splits
    facts = [("Model", str(attributes.get("model", config.model.type)))]
    if "parameters" in attributes:
        facts.append(("Parameters", f"{int(attributes['parameters']):,}"))
    for name in found.table.contenders:
        whose = "" if name == "model" else f" of {name}"
        told = ((what, found.table.told(key, name)) for what, key in _TOLD)
        facts += [(f"{what}{whose}", value) for what, value in told if value]
    if log is not None:
        step, loss = log.train[-1]
        facts.append(("Training", f"{step} steps, last loss {loss:.4g}"))
        if log.valid:
            best = min(log.valid, key=lambda row: row[1])
            facts.append(("Validation loss", f"lowest {best[1]:.4g} at step {best[0]}"))
    leads = found.table.lead_hours
    return facts + [
        ("Test period", " to ".join(splits.test)),
        ("Period of climatology and damping", " to ".join(splits.train)),
        ("Truth", describe_truth(config.data)),
        ("Grid of the scores", found.table.dataset.attrs["grid"]),
        ("Time step", config.data.timestep),
        ("Cases", f"{found.table.n_cases} initial times, {found.table.dataset.attrs['initial_times']}"),
        ("Hours of the initial times", f"{found.table.dataset.attrs['initial_hours']} UTC"),
        ("Lead times", f"{leads[0]:g} h to {leads[-1]:g} h"),
        ("Climatology", found.climatology.description),
        ("Damped persistence", "climatology plus r(lead) times the anomaly, r fitted on the training period"),
        *((name, found.table.dataset.attrs[key]) for name, key in _OF_EVENTS if key in found.table.dataset.attrs),
    ]


def _terms(page: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (what, explanation) of the scores of a page and of what belongs to them."""
    terms = []
    for own in page["metrics"]:
        winds = f" Of wind vectors: {own['wind']}" if own["wind"] else ""
        terms.append((own["label"], f"{own['what']} {own['good']}{winds}"))
    numbers = {"least": page["least_blocks"], "enough": page["enough_blocks"]}
    return [*terms, *((name, text.format(**numbers)) for name, text in TERMS), *BASELINE_MEANINGS]


def _plain(table: ScoreTable) -> list[tuple[str, str, str, list[str], list[str]]]:
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


def _blurring(found: Verification) -> dict[str, Any] | None:
    """Return the wavenumbers, the forecasts and the rows (channel, units, lead, RMSE and power by forecast)."""
    table = found.table
    if SHORT_WAVES not in table.dataset:
        return None
    number = table.dataset["wavenumber"].values
    short = number[shortest_third(number)]
    if not len(short):
        return None
    rows = [
        (channel, superscript_units(table.units(channel)), f"{hours:g} h", [
            (_number(table.value(name, channel, hours)), _number(table.value(name, channel, hours, SHORT_WAVES), ".2f"))
            for name in table.contenders
        ])
        for channel in table.dataset["spectrum_channel"].values.tolist()
        for hours in table.dataset["spectrum_lead"].values.tolist()
    ]  # fmt: skip
    return {"first": short[0], "last": short[-1], "forecasts": [label(name) for name in table.contenders], "rows": rows}


def _number(value: float, form: str = ".4g") -> str:
    return "" if value != value else format(value, form)
