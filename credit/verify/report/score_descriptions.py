"""What the scores of report.html mean, in a sentence or two each; the page on scores of the docs says more."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScoreDescription:
    """A score in words.

    Attributes:
        label: its name for people.
        what: what it is.
        good: what a good value is.
        wind_label: its name where the row is a wind vector.
        wind: how it is taken of wind vectors, "" where as of any other.
        has_units: whether it has those of the variable.
        line: the value that charts mark, None for none.
    """

    label: str
    what: str
    good: str
    wind_label: str = ""
    wind: str = ""
    has_units: bool = True
    line: float | None = None


MEANINGS = {
    "rmse": ScoreDescription(
        "Root-mean-square error (RMSE)",
        "Root of the squared error's mean over cells, weighted by area, and cases; of an ensemble that of its mean.",
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
        "Correlation of forecast and truth as departures from the climatology, all cases in one.",
        "1 is perfect, 0 is no better than the climatology, which has none itself. At 500 hPa 0.6 is often taken as "
        "the end of what is useful.",
        wind="Products and squares of both components are added.",
        has_units=False,
        line=1.0,
    ),
    "activity_ratio": ScoreDescription(
        "Activity, forecast over truth",
        "How much the departures from the climatology vary in space, in the forecast over the truth.",
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
        "1 is good; below 1 the ensemble is too sure of itself, above 1 not sure enough.",
        has_units=False,
        line=1.0,
    ),
}

# of single channels
SEEPS_MEANING = ScoreDescription(
    "SEEPS (precipitation)",
    "Whether it is dry, rains lightly or heavily, after the climate of each cell and season; what is rare counts more. "
    "Of an ensemble the mean over members.",
    "Smaller is better: 0 is perfect, 1 is what every constant forecast gets on average. Cells that are nearly always "
    "or nearly never dry are left out.",
    has_units=False,
    line=1.0,
)
# of events, whose name goes behind the label and whose definition before the rest
EVENT_MEANINGS = {
    "brier": ScoreDescription(
        "Brier score",
        "Mean squared difference of the forecast probability, which is the share of the members, and what happened "
        "(0 or 1); the climatology forecasts how often the event happens at that place and season.",
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

BASELINE_MEANINGS = (
    ("Persistence", "the weather of the initial time, unchanged"),
    ("Damped persistence", "the climatology plus the departure of the initial time, which fades with lead time"),
    ("Climatology", "what is usual at that time of the year, whatever the weather of the initial time"),
)

TERMS = (
    (
        "Lead time",
        "Time from the start of a forecast to the time that it is for. A case is the start of one; all forecasts and "
        "baselines are scored on the same cases.",
    ),
    (
        "Shaded: 95 % intervals",
        "Where the score would probably lie had other days been scored. Forecasts that start a day apart err alike, so "
        "whole blocks of days are drawn at random again and again. They say how far to trust a curve, not whether two "
        "differ: forecasts of the same days may differ surely although their intervals overlap.",
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
        "is a forecast that cannot tell days apart, a line flatter than the diagonal one that is too sure.",
    ),
    (
        "Best baseline",
        "At each place of the scorecard the best of persistence, damped persistence and climatology: to be better than "
        "one of them is easy.",
    ),
)
