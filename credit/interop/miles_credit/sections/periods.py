"""Training, validation and test periods, derived from the periods of miles-credit, which has no test period."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta

# Smallest gap between two periods: the default of `data.split_gap`.
_GAP = timedelta(days=10)
# Validation periods that are shorter than this are divided without a gap.
_SHORTEST_VALIDATION_WITH_GAP = timedelta(days=60)
_DAY = timedelta(days=1)


@dataclass(frozen=True)
class Periods:
    """Periods of a run; each period includes its first and last day.

    Attributes:
        train: training period.
        valid: validation period.
        test: test period.
        split_gap: value of `data.split_gap`.
        changes: sentences that describe the changes compared with the periods in the original config.
    """

    train: tuple[date, date]
    valid: tuple[date, date]
    test: tuple[date, date]
    split_gap: str
    changes: tuple[str, ...]

    def to_splits(self) -> dict[str, list[str]]:
        """Return the value of `data.splits`."""
        splits = {}
        for name, period in (("train", self.train), ("valid", self.valid), ("test", self.test)):
            splits[name] = [day.isoformat() for day in period]
        return splits


def derive_periods(train: tuple[date, date], valid: tuple[date, date] | None) -> Periods | None:
    """Derive separate training, validation and test periods within the periods of the original config.

    The test period is the second half of the validation period of the file. The training period ends before the
    validation period begins, or begins after the validation period ends. If the file has no validation period, the last
    fifth of the training period replaces it.

    Args:
        train: training period of the original config (first day, last day).
        valid: validation period of the original config (first day, last day); None if it has no validation period.

    Returns:
        The periods; None if one of the periods would have no days.
    """
    changes = []
    if valid is None:
        num_days = (train[1] - train[0]).days + 1
        valid = (train[1] - timedelta(days=max(num_days // 5, 2) - 1), train[1])
        changes.append("the file has no validation period; the last fifth of the training period replaces it")

    is_long = valid[1] - valid[0] >= _SHORTEST_VALIDATION_WITH_GAP
    gap = timedelta(0)
    if is_long:
        gap = _GAP
    middle = valid[0] + (valid[1] - valid[0]) // 2
    test = (middle + _DAY, valid[1])
    shorter_valid = (valid[0], middle - gap)
    changes.append("miles-credit has no test period; the second half of the validation period is the test period")

    # The training period is the larger part before or after the validation and test periods.
    shorter_train = train
    before = (train[0], min(train[1], valid[0] - gap - _DAY))
    after = (max(train[0], valid[1] + gap + _DAY), train[1])
    if before[1] - before[0] >= after[1] - after[0]:
        shorter_train = before
    else:
        shorter_train = after
    if shorter_train != train:
        changes.append("the training period is shortened, so that there is a gap to the other periods")
    periods = Periods(shorter_train, shorter_valid, test, "10d" if is_long else "1min", tuple(changes))
    for first, last in (periods.train, periods.valid, periods.test):
        if last < first:
            return None
    return periods
