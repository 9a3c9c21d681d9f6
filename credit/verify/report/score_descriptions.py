"""Short descriptions of the scores for readers of report.html; the documentation has a page with the details."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScoreDescription:
    """Description of a score for readers.

    The JavaScript of the page reads these fields by their names.

    Attributes:
        label: name of the score in the page.
        definition: definition of the score in one or two sentences.
        good: sentences on good and bad values.
        wind_label: name of the score for wind vectors; "" if it is the same as `label`.
        wind: sentence on the computation for wind vectors; "" if it is the same as for other variables.
        has_units: True if the score has the units of the variable, False if it is dimensionless.
        line: value at which charts show a horizontal line, such as that of a perfect score; None for no line.
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
        "Square root of the mean squared error over cells (area-weighted) and cases. For an ensemble, the error of the "
        "ensemble mean.",
        "Smaller is better; 0 is perfect. Large errors count more than in the mean absolute error, so smooth forecasts "
        "have an advantage.",
        wind_label="RMSE of the wind vector",
        wind="The squared errors of both components are added.",
        line=0.0,
    ),
    "bias": ScoreDescription(
        "Bias",
        "Mean error, forecast minus truth.",
        "0 is good. Errors of opposite sign in two places cancel.",
        wind_label="Bias of the wind speed",
        wind="For winds, it is the bias of the speed, not of the components.",
        line=0.0,
    ),
    "mae": ScoreDescription(
        "Mean absolute error",
        "Mean of the absolute value of the error. For an ensemble, the error of the ensemble mean.",
        "Smaller is better; 0 is perfect.",
        wind_label="Mean length of the vector error",
        wind="For winds, it is the mean length of the vector error.",
        line=0.0,
    ),
    "acc": ScoreDescription(
        "Anomaly correlation",
        "Correlation between the anomalies of forecast and truth, over all cases together. An anomaly is the "
        "difference from the climatology.",
        "1 is perfect; 0 is as good as the climatology, whose own anomaly correlation is undefined. At 500 hPa, a "
        "forecast is often called useful up to the lead time at which the value falls below 0.6.",
        wind="For winds, products and squares of both components are added.",
        has_units=False,
        line=1.0,
    ),
    "activity_ratio": ScoreDescription(
        "Activity, forecast over truth",
        "Spatial standard deviation of the anomaly of the forecast, divided by that of the truth.",
        "1 is good. Below 1 the forecast is too smooth, which lowers its RMSE. Above 1 it has too much variance.",
        has_units=False,
        line=1.0,
    ),
    "crps": ScoreDescription(
        "Continuous ranked probability score (CRPS)",
        "Mean distance of the members from the truth, minus half of the mean distance between two members. For a "
        "single forecast it is the mean absolute error, so ensembles and single forecasts can be compared.",
        "Smaller is better; 0 is perfect. A good value needs an accurate ensemble with a small spread.",
        wind_label="Energy score of the wind vector",
        wind="For winds, it is the energy score: distances are lengths of vectors.",
        line=0.0,
    ),
    "spread": ScoreDescription(
        "Spread",
        "Square root of the mean variance over members.",
        "It should be as large as the RMSE of the ensemble mean; see spread over error.",
        wind_label="Spread of the wind vector",
        line=0.0,
    ),
    "spread_skill": ScoreDescription(
        "Spread over error",
        "Spread divided by the RMSE of the ensemble mean, corrected for the number of members.",
        "1 is good. Below 1 the ensemble is overconfident, above 1 underconfident.",
        has_units=False,
        line=1.0,
    ),
}

# Of single channels.
SEEPS_DESCRIPTION = ScoreDescription(
    "SEEPS (precipitation)",
    "Penalty for forecasting the wrong category: dry, light or heavy precipitation. The climate of each cell and "
    "season defines the categories; missing a rare one costs more. For an ensemble, the mean over members.",
    "Smaller is better: 0 is perfect, and a constant forecast scores 1 on average. Cells that are almost always or "
    "almost never dry are omitted.",
    has_units=False,
    line=1.0,
)
# Of events: their name is appended to the label, and their definition put before the rest.
EVENT_DESCRIPTIONS = {
    "brier": ScoreDescription(
        "Brier score",
        "Mean squared difference between forecast probability and outcome (0 or 1). The probability is the share of "
        "members that forecast the event. The climatology forecasts the frequency of the event in that cell "
        "and season.",
        "Smaller is better; 0 is perfect.",
        has_units=False,
        line=0.0,
    ),
    "brier_skill": ScoreDescription(
        "Brier skill score",
        "1 minus the Brier score divided by that of the climatological probability of each cell and season.",
        "1 is perfect; 0 is as good as the climatology. Single forecasts give only the probabilities 0 and 1, so they "
        "are often worse than the climatology.",
        has_units=False,
        line=0.0,
    ),
}

BASELINE_DESCRIPTIONS = (
    ("Persistence", "the state at the initial time, unchanged"),
    ("Damped persistence", "the climatology plus the initial anomaly, which is reduced with lead time"),
    ("Climatology", "the mean state of the time of the year"),
)

TERMS = (
    (
        "Lead time",
        "Time from the initial time of a forecast to the time that it describes. Each initial time is a case; all "
        "forecasts and baselines are scored on the same cases.",
    ),
    (
        "Shaded: 95 % intervals",
        "Range in which the score would probably lie on other days of the same climate. Forecasts that start one day "
        "apart have similar errors, so whole blocks of days are resampled. Two forecasts of the same days may differ "
        "significantly although their intervals overlap.",
    ),
    (
        "Blocks",
        "Periods of at least 5 days, and at least the lead time plus 2 days; two blocks are nearly independent. With "
        "fewer than {least} blocks there is no interval. With fewer than {enough} no difference is called significant.",
    ),
    (
        "Stars and hatching",
        "The difference from the reference is significant. The test subtracts the squared errors (or CRPS, Brier "
        "scores, SEEPS penalties) of the same cases, and compares the means of blocks. A scorecard has hundreds of "
        "tests, and some look significant by chance. The p-values are adjusted, so about 5 % of the marks are false.",
    ),
    (
        "Reliability diagram",
        "Frequency of an event for each forecast probability. A reliable forecast lies on the diagonal. A line that is "
        "flatter than the diagonal shows overconfidence. A horizontal line shows a forecast without information.",
    ),
    (
        "Best baseline",
        "The best of persistence, damped persistence and climatology, for each cell of the scorecard.",
    ),
)
