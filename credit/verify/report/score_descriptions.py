"""Short descriptions of the scores in report.html; the page on scores of the documentation has the details."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScoreDescription:
    """Description of a score.

    The script of the page reads these fields by their names.

    Attributes:
        label: name for people.
        definition: the definition in a sentence.
        good: sentence on good values.
        wind_label: name for a wind vector, "" if it is the same.
        wind: sentence on its computation for wind vectors, "" if it is the same.
        has_units: True if it has the units of the variable.
        line: value that charts mark, None for none.
    """

    label: str
    definition: str
    good: str
    wind_label: str = ""
    wind: str = ""
    has_units: bool = True
    line: float | None = None


SCORE_DESCRIPTIONS = {
    "rmse": ScoreDescription(
        "Root-mean-square error (RMSE)",
        "Root of the squared error's area-weighted mean over cells and cases; of an ensemble that of its mean.",
        "Smaller is better; 0 is perfect. Large errors count more than in the mean absolute error, so smooth forecasts "
        "do well.",
        wind_label="RMSE of the wind vector",
        wind="The squared errors of both components are added.",
        line=0.0,
    ),
    "bias": ScoreDescription(
        "Bias",
        "Mean error, forecast minus truth.",
        "0 is good, but errors of opposite sign in two places cancel.",
        wind_label="Bias of the wind speed",
        wind="The speed's, not the components'.",
        line=0.0,
    ),
    "mae": ScoreDescription(
        "Mean absolute error",
        "Mean of the error without its sign; of an ensemble that of its mean.",
        "Smaller is better; 0 is perfect.",
        wind_label="Mean length of the vector error",
        wind="The length of the vector error stands for the absolute error.",
        line=0.0,
    ),
    "acc": ScoreDescription(
        "Anomaly correlation",
        "Correlation of the anomalies of forecast and truth from the climatology, of all cases together.",
        "1 is perfect, 0 is no better than the climatology, which has none itself. At 500 hPa 0.6 is often taken as "
        "the end of what is useful.",
        wind="Products and squares of both components are added.",
        has_units=False,
        line=1.0,
    ),
    "activity_ratio": ScoreDescription(
        "Activity, forecast over truth",
        "Standard deviation in space of the anomalies, of the forecast over that of the truth.",
        "1 is good; below 1 the forecast is too smooth, which flatters its RMSE, above 1 it is too rough.",
        has_units=False,
        line=1.0,
    ),
    "crps": ScoreDescription(
        "Continuous ranked probability score (CRPS)",
        "How far the members lie from the truth, less how far they lie from each other; of a single forecast the mean "
        "absolute error, so both can be compared.",
        "Smaller is better; 0 is perfect. It rewards being sharp and being right at once.",
        wind_label="Energy score of the wind vector",
        wind="It is the energy score, with lengths of vectors for absolute values.",
        line=0.0,
    ),
    "spread": ScoreDescription(
        "Spread",
        "Root of the mean variance over members.",
        "It should be as large as the error of the mean: see spread over error.",
        wind_label="Spread of the wind vector",
        line=0.0,
    ),
    "spread_skill": ScoreDescription(
        "Spread over error",
        "Spread of the members over the RMSE of their mean, corrected for the number of members.",
        "1 is good; below 1 the ensemble is overconfident, above 1 underconfident.",
        has_units=False,
        line=1.0,
    ),
}

# Of single channels.
SEEPS_DESCRIPTION = ScoreDescription(
    "SEEPS (precipitation)",
    "Error in the categories dry, light and heavy rain of the climate of each cell and season; rare ones count more. "
    "Of an ensemble the mean over members.",
    "Smaller is better: 0 is perfect, 1 is the average of every constant forecast. Cells that are nearly always "
    "or nearly never dry are left out.",
    has_units=False,
    line=1.0,
)
# Of events: their name is appended to the label, and their definition put before the rest.
EVENT_DESCRIPTIONS = {
    "brier": ScoreDescription(
        "Brier score",
        "Mean squared difference of the forecast probability, which is the share of the members, and the outcome (0 or "
        "1); the climatology forecasts the frequency of the event at that place and season.",
        "Smaller is better; 0 is perfect.",
        has_units=False,
        line=0.0,
    ),
    "brier_skill": ScoreDescription(
        "Brier skill score",
        "How much smaller the Brier score is than that of the climatological probability of each cell and season.",
        "1 is perfect; 0 is no better than the climatology, and single forecasts, which are certain every time, are "
        "often worse.",
        has_units=False,
        line=0.0,
    ),
}

BASELINE_DESCRIPTIONS = (
    ("Persistence", "the weather of the initial time, unchanged"),
    ("Damped persistence", "the climatology plus the departure of the initial time, which fades with lead time"),
    ("Climatology", "the average weather of that time of the year"),
)

TERMS = (
    (
        "Lead time",
        "Time from the start of a forecast to the time that it is for. A case is the start of one; all forecasts and "
        "baselines are scored on the same cases.",
    ),
    (
        "Shaded: 95 % intervals",
        "Range of the score on other days of the same climate. Forecasts that start a day apart have similar errors, "
        "so whole blocks of days are resampled. Overlapping intervals do not mean that two forecasts are equal: "
        "forecasts of the same days may differ significantly although their intervals overlap.",
    ),
    (
        "Blocks",
        "Stretches of at least 5 days, and of the lead time and 2 days more, which are nearly independent. With fewer "
        "than {least} there is no interval, with fewer than {enough} no difference is called significant.",
    ),
    (
        "Stars and hatching",
        "The difference to the reference is significant: squared errors of the same cases (or their CRPS, Brier "
        "scores, or penalties of SEEPS) are subtracted and the means over blocks tested. A scorecard has hundreds of "
        "tests, some of which look significant by chance; the marks are set so that about 5 % of them are false.",
    ),
    (
        "Reliability diagram",
        "How often an event happened where it was forecast with a probability; the diagonal is reliable. A flat line "
        "is a forecast that does not distinguish days, a line flatter than the diagonal is overconfident.",
    ),
    (
        "Best baseline",
        "For each cell of the scorecard the best of persistence, damped persistence and climatology.",
    ),
)
