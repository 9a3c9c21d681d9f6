"""Write report.html: one self-contained file with the scores, the figures and their metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from credit import __version__
from credit.config import Config, dump_config
from credit.config.sections.verification import BEST_BASELINE
from credit.forecast.forecast_source import ForecastSource
from credit.utils.atomic import atomic_write_text
from credit.verify.report.html import embed_figures, render_template
from credit.verify.report.metadata import TrainingLog, describe_data, describe_truth
from credit.verify.report.page_scores import build_page_scores, encode_page_scores, superscript_units
from credit.verify.report.reference_scores import compare_with_published, select_comparable_scores
from credit.verify.report.score_descriptions import BASELINE_DESCRIPTIONS, TERMS
from credit.verify.scorer import Verification
from credit.verify.table.spectra_rows import is_among_shortest_third
from credit.verify.table.table import SHORT_WAVES, ScoreTable

# (name in the report, attribute of a forecast)
_FORECAST_ATTRIBUTES = (
    ("Run", "experiment"),
    ("Checkpoint step", "checkpoint_step"),
    ("Fingerprint of the weights", "weights"),
    ("Trained and selected on", "seen_periods"),
    ("Members", "members"),
    ("Ensemble", "ensemble"),
    ("Forcing in the forecast", "forcing"),
)
_EVENT_ATTRIBUTES = (("Events", "events"), ("Climate of events and SEEPS", "climate_of_events"))
# Stems of figures that are not embedded, because the page draws these scores with JavaScript.
_INTERACTIVE_FIGURES = ("skill", "spread", "scorecard")
# Largest size in bytes of an embedded animation.
_MAX_ANIMATION_BYTES = 3_000_000


def write_report(
    config: Config,
    verification: Verification,
    archive: ForecastSource,
    log: TrainingLog | None,
    figures: Sequence[tuple[str, Path]],
    folder: Path,
    notice: str | None = None,
) -> Path:
    """Write ``report.html`` into `folder` atomically, and return its path.

    Args:
        config: config of the run.
        verification: result of the verification.
        archive: forecasts of the model.
        log: training log of the model; None if there is none.
        figures: (caption, path of a PNG or a GIF) of each figure.
        folder: folder for the report.
        notice: additional remark for the readers; None for no remark.

    Raises:
        CreditError: if the file cannot be written.
    """
    # The title names the compared run, and the notices precede all scores.
    table = verification.table
    attributes = table.dataset.attrs
    against = attributes.get("compared_with")
    title = config.experiment
    if against is not None:
        title += f" against {against}"
    notices = _list_notices(verification)
    if notice:
        notices.insert(0, notice)
    # The page draws the scores from embedded data with JavaScript; other figures are embedded as images.
    page, left_out = build_page_scores(table, verification.figure_channels[0])
    images = [(caption, path) for caption, path in figures if _is_embedded(path)]
    text = render_template(
        "report.html.j2",
        title=title,
        version=__version__,
        model_name=table.display_name("model"),
        cases=f"{table.n_cases} forecasts from {attributes['initial_times']}",
        notices=notices,
        data_notes=describe_data(config.data),
        facts=_list_metadata(config, verification, archive, log),
        blurring=_tabulate_blurring(table),
        hours=attributes["initial_hours"],
        published=_compare_with_published(verification, archive),
        packed=encode_page_scores(page),
        left_out=left_out,
        significance=table.describe_significance(against or BEST_BASELINE),
        terms=_list_glossary_terms(page),
        forecasts=[table.display_name(name) for name in table.forecasts],
        plain=_tabulate_main_scores(table),
        figures=embed_figures(images),
        animations=_embed_animations(figures),
        config=dump_config(config),
    )
    return atomic_write_text(folder / "report.html", text)


def _compare_with_published(
    verification: Verification, archive: ForecastSource
) -> list[tuple[str, str, float, float, float, str]]:
    """Return rows that compare the model with published scores, see `compare_with_published`.

    Only published scores on the same grid, for the same years and against the same truth are used.
    """
    # The spacing of the columns, which cover 360 degrees.
    grid_degrees = 360.0 / verification.grid.shape[1]
    comparable = select_comparable_scores(verification.table, grid_degrees, verification.cases, archive.calendar)
    return compare_with_published(comparable, verification.table)


def _is_embedded(path: Path) -> bool:
    """Return True if the page embeds a figure as an image; the page draws the other figures with JavaScript."""
    return path.suffix == ".png" and not path.stem.startswith(_INTERACTIVE_FIGURES)


def _embed_animations(figures: Sequence[tuple[str, Path]]) -> list[tuple[str, str, str | None, int]]:
    """Encode the animations among the figures in base64, so that the template can embed them.

    Args:
        figures: (caption, path) of all figures; only GIF files are animations.

    Returns:
        (caption, file name, base64 string of the file, smallest readable width in CSS pixels) of each animation. For an
        animation that is too large to embed, the base64 string is None and the width is 0.
    """
    animations = []
    for caption, path in figures:
        if path.suffix != ".gif":
            continue
        image = None
        width = 0
        if path.stat().st_size <= _MAX_ANIMATION_BYTES:
            [(_, image, width)] = embed_figures([(caption, path)])
        animations.append((caption, path.name, image, width))
    return animations


def _list_notices(verification: Verification) -> list[str]:
    """Return notices about missing scores and about differences that make comparisons of the forecasts unfair."""
    notices = verification.table.warnings()
    if verification.climatology.short_period_warning:
        notices.append(verification.climatology.short_period_warning)
    if verification.num_left_out:
        notices.append(
            f"{verification.num_left_out} of the forecasts were left out: the test period has no truth at one of their "
            "lead times, or another forecast does not have their initial times."
        )
    return notices


def _list_metadata(
    config: Config, verification: Verification, archive: ForecastSource, log: TrainingLog | None
) -> list[tuple[str, str]]:
    """Return (name, value) of each entry in the list of metadata of the report.

    Args:
        config: config of the run.
        verification: result of the verification.
        archive: forecasts of the model.
        log: training log of the model; None if there is none.
    """
    table = verification.table
    attributes = archive.attributes
    splits = config.data.splits
    # The first facts describe the model and every other forecast.
    facts = [("Model", str(attributes.get("model", config.model.type)))]
    if "parameters" in attributes:
        facts.append(("Parameters", f"{int(attributes['parameters']):,}"))
    for forecast in table.candidates:
        suffix = ""
        if forecast != "model":
            suffix = f" of {forecast}"
        for name, attribute in _FORECAST_ATTRIBUTES:
            # An attribute that the forecast files do not have is "".
            value = table.forecast_attribute(attribute, forecast)
            if value:
                facts.append((f"{name}{suffix}", value))
    # The next facts describe the training run of the model.
    if log is not None:
        step, loss = log.train[-1]
        facts.append(("Training", f"{step} steps, last loss {loss:.4g}"))
        if log.valid:
            best_step, best_loss = min(log.valid, key=lambda row: row[1])
            facts.append(("Validation loss", f"lowest {best_loss:.4g} at step {best_step}"))
    # The last facts describe data, cases and baselines.
    leads = table.lead_hours
    facts += [
        ("Test period", " to ".join(splits.test)),
        ("Period of climatology and damping", " to ".join(splits.train)),
        ("Truth", describe_truth(config.data)),
        ("Grid of the scores", table.dataset.attrs["grid"]),
        ("Time step", config.data.timestep),
        ("Cases", f"{table.n_cases} initial times, {table.dataset.attrs['initial_times']}"),
        ("Hours of the initial times", f"{table.dataset.attrs['initial_hours']} UTC"),
        ("Lead times", f"{leads[0]:g} h to {leads[-1]:g} h"),
        ("Climatology", verification.climatology.description),
        ("Damped persistence", "climatology plus r(lead) times the initial anomaly, r fitted to the training period"),
    ]
    for name, attribute in _EVENT_ATTRIBUTES:
        if attribute in table.dataset.attrs:
            facts.append((name, table.dataset.attrs[attribute]))
    return facts


def _list_glossary_terms(page: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the glossary of the report, (term, explanation) of each score, statistical term and baseline.

    Args:
        page: data of the page from `credit.verify.report.page_scores.build_page_scores`.
    """
    terms = []
    for score in page["metrics"]:
        explanation = f"{score['definition']} {score['good']}"
        if score["wind"]:
            explanation += f" {score['wind']}"
        terms.append((score["label"], explanation))
    # The explanation of blocks has placeholders for two numbers of blocks.
    for term, text in TERMS:
        terms.append((term, text.format(least=page["least_blocks"], enough=page["enough_blocks"])))
    return [*terms, *BASELINE_DESCRIPTIONS]


def _tabulate_main_scores(table: ScoreTable) -> list[tuple[str, str, str, list[str], list[str]]]:
    """Return the rows of the table that the page shows without JavaScript.

    Each row is (channel, units, lead time, RMSE of each forecast, anomaly correlation of each forecast). All entries
    are strings.
    """
    rows = []
    for channel in table.channels:
        for hours in table.summary_leads():
            rmse = []
            acc = []
            for name in table.forecasts:
                rmse.append(_format_number(table.score(name, channel, hours)))
                acc.append(_format_number(table.score(name, channel, hours, "acc"), ".3f"))
            rows.append((channel, table.units(channel), f"{hours:g} h", rmse, acc))
    return rows


def _tabulate_blurring(table: ScoreTable) -> dict[str, Any] | None:
    """Return the table of RMSE and short-wave power, which shows blurred forecasts; None if there are no spectra.

    A forecast is blurred if its short waves have less power than the short waves of the truth. Short waves are the
    shortest third of the waves.

    Returns:
        A dict for the template. ``first`` and ``last`` are the range of the total wavenumbers of short waves, and
        ``forecasts`` are the labels of the forecasts. ``rows`` are (channel, units, lead time, scores); the scores are
        (RMSE, power of the short waves divided by their power in the truth) of each forecast.
    """
    if SHORT_WAVES not in table.dataset:
        return None
    # On a very coarse grid, there are too few wavenumbers to select a third.
    wavenumbers = table.dataset["wavenumber"].values
    short_waves = wavenumbers[is_among_shortest_third(wavenumbers)]
    if not len(short_waves):
        return None
    rows = []
    for channel in table.dataset["spectrum_channel"].values.tolist():
        for hours in table.dataset["spectrum_lead"].values.tolist():
            scores = []
            for name in table.candidates:
                rmse = _format_number(table.score(name, channel, hours))
                power = _format_number(table.score(name, channel, hours, SHORT_WAVES), ".2f")
                scores.append((rmse, power))
            rows.append((channel, superscript_units(table.units(channel)), f"{hours:g} h", scores))
    return {
        "first": short_waves[0],
        "last": short_waves[-1],
        "forecasts": [table.display_name(name) for name in table.candidates],
        "rows": rows,
    }


def _format_number(value: float, format_spec: str = ".4g") -> str:
    """Return a number formatted with a Python format specification, "" for NaN."""
    if math.isnan(value):
        return ""
    return format(value, format_spec)
