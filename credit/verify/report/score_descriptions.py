"""Short descriptions of the scores for readers of report.html; docs/scores.md contains the details."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScoreDescription:
    """Description of a score for readers of the report.

    The JavaScript of the page reads these attributes by their names.

    Attributes:
        label: name of the score in the page.
        definition: definition of the score in one to three sentences.
        good: sentences that state which values are good.
        wind_label: name of the score for wind vectors; "" if it equals `label`.
        wind: sentence about the computation for wind vectors; "" if it does not differ from other variables.
        has_units: True if the score has the units of the variable, False if it is dimensionless.
        line: value at which charts show a horizontal line, such as the perfect score; None for no line.
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
        "Smaller is better; 0 is perfect. Large errors have more weight than in the mean absolute error, so smooth "
        "forecasts have an advantage.",
        wind_label="RMSE of the wind vector",
        wind="For winds, the squared errors of both components are added.",
        line=0.0,
    ),
    "bias": ScoreDescription(
        "Bias",
        "Mean error, forecast minus truth.",
        "0 is good. Errors of opposite sign in two places cancel.",
        wind_label="Bias of the wind speed",
        wind="For winds, it is the bias of the wind speed.",
        line=0.0,
    ),
    "mae": ScoreDescription(
        "Mean absolute error",
        "Mean of the absolute value of the error. For an ensemble, the error of the ensemble mean.",
        "Smaller is better; 0 is perfect.",
        wind_label="Mean length of the error vector",
        wind="For winds, it is the mean length of the error vector.",
        line=0.0,
    ),
    "acc": ScoreDescription(
        "Anomaly correlation",
        "Correlation between the anomalies of forecast and truth, over all cases together. An anomaly is the "
        "difference from the climatology.",
        "1 is perfect; 0 is as good as the climatology, which has no anomaly correlation. At 500 hPa, a forecast is "
        "often called useful up to the lead time at which the value falls below 0.6.",
        wind="For winds, products and squares of both components are added.",
        has_units=False,
        line=1.0,
    ),
    "activity_ratio": ScoreDescription(
        "Activity, forecast over truth",
        "Spatial standard deviation of the anomaly of the forecast, divided by the same quantity of the truth.",
        "1 is good. Below 1, the forecast is too smooth, which lowers its RMSE. Above 1, it has too much variance.",
        has_units=False,
        line=1.0,
    ),
    "crps": ScoreDescription(
        "Continuous ranked probability score (CRPS)",
        "Mean distance of the members from the truth, minus half of the mean distance between two members. For a "
        "single forecast, it is the mean absolute error, so ensembles and single forecasts can be compared.",
        "Smaller is better; 0 is perfect. A good value needs an accurate ensemble with a small spread.",
        wind_label="Energy score of the wind vector",
        wind="For winds, it is the energy score: distances are lengths of vectors.",
        line=0.0,
    ),
    "spread": ScoreDescription(
        "Spread",
        "Square root of the mean variance over members.",
        "The spread should be as large as the RMSE of the ensemble mean; see spread over error.",
        wind_label="Spread of the wind vector",
        line=0.0,
    ),
    "spread_skill": ScoreDescription(
        "Spread over error",
        "Spread divided by the RMSE of the ensemble mean, corrected for the number of members.",
        "1 is good. Below 1, the ensemble is overconfident; above 1, it is underconfident.",
        has_units=False,
        line=1.0,
    ),
}

# SEEPS is only computed for channels with precipitation.
SEEPS_DESCRIPTION = ScoreDescription(
    "SEEPS (precipitation)",
    "Penalty for forecasting the wrong category: dry, light or heavy precipitation. The climate of each cell and "
    "season defines the categories; the penalty for a missed rare category is larger. For an ensemble, the mean over "
    "members.",
    "Smaller is better: 0 is perfect, and a constant forecast has a mean penalty of 1. Cells that are almost always or "
    "almost never dry are omitted.",
    has_units=False,
    line=1.0,
)
# Scores of events; the name of the event is appended to the label, and its definition precedes the definition.
EVENT_DESCRIPTIONS = {
    "brier": ScoreDescription(
        "Brier score",
        "Mean squared difference between forecast probability and outcome (0 or 1). The probability is the fraction of "
        "members that forecast the event. The baseline climatology forecasts the frequency of the event in each cell "
        "and season.",
        "Smaller is better; 0 is perfect.",
        has_units=False,
        line=0.0,
    ),
    "brier_skill": ScoreDescription(
        "Brier skill score",
        "1 minus the Brier score divided by the Brier score of the climatological probability of each cell and season.",
        "1 is perfect; 0 is as good as the climatology. Single forecasts give only the probabilities 0 and 1, so they "
        "are often worse than the climatology.",
        has_units=False,
        line=0.0,
    ),
}

BASELINE_DESCRIPTIONS = (
    ("Persistence", "the state at the initial time, unchanged"),
    ("Damped persistence", "the climatology plus the initial anomaly, which is reduced with lead time"),
    ("Climatology", "the mean state for the time of the year"),
)

TERMS = (
    (
        "Lead time",
        "Time from the initial time to the valid time of a forecast. Each initial time is a case; all forecasts and "
        "baselines are scored on the same cases.",
    ),
    (
        "Shaded: 95 % intervals",
        "Range that would probably contain the score on other days of the same climate. Forecasts with initial times "
        "one day apart have similar errors, so blocks of days are resampled. Two forecasts of the same days may differ "
        "significantly although their intervals overlap.",
    ),
    (
        "Blocks",
        "Periods of at least 5 days, and at least the lead time plus 2 days; two blocks are nearly independent. With "
        "fewer than {least} blocks, there is no interval. With fewer than {enough} blocks, no difference is marked as "
        "significant.",
    ),
    (
        "Stars and hatching",
        "The difference from the reference is significant. The test subtracts the squared errors (or CRPS, Brier "
        "scores, SEEPS penalties) of the two forecasts in each case, and uses the means over blocks. A scorecard has "
        "hundreds of tests, so some p-values are small by chance. The p-values are adjusted, so that at most about 5 % "
        "of the marks are expected to be false.",
    ),
    (
        "Reliability diagram",
        "Observed frequency of an event for each forecast probability. The line of a reliable forecast is the "
        "diagonal. A line that is flatter than the diagonal shows overconfidence. A horizontal line shows a forecast "
        "without information.",
    ),
    (
        "Best baseline",
        "The best of persistence, damped persistence and climatology, for each cell of the scorecard.",
    ),
)
