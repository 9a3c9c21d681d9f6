"""AddableSums: what the sums of every ensemble score have in common, a count of cases and addition."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from credit.errors import DataError


@dataclass
class AddableSums:
    """Sums over cases, of which two add up to those of all the cases of both.

    Arrays are added; whatever else a subclass has (the number of members) must be the same in both.

    Attributes:
        cases: (L,) int64, how many cases were added at each lead time; `add` of a subclass counts them.
    """

    cases: np.ndarray

    def __add__(self, other: Self) -> Self:
        """Return the sums over the cases of both.

        Raises:
            DataError: if the two are of forecasts that are unlike.
        """
        total = {}
        for name in (field.name for field in fields(self)):
            mine, theirs = getattr(self, name), getattr(other, name)
            if not isinstance(mine, np.ndarray):
                _require_equal(type(self).__name__, name, mine, theirs)
                total[name] = mine
            else:
                _require_equal(type(self).__name__, f"the shape of {name}", mine.shape, theirs.shape)
                total[name] = mine + theirs
        return type(self)(**total)

    def average(self, sums: np.ndarray) -> np.ndarray:
        """Return `sums` (L, ...) divided by the number of cases; NaN at a lead time that has none."""
        with np.errstate(invalid="ignore"):
            return sums / self.cases.reshape(-1, *(1,) * (sums.ndim - 1))


def require_members(members: int, found: int) -> None:
    """Refuse a case whose number of members is not that of the others.

    Raises:
        DataError: if the two numbers differ, or there is no member.
    """
    if members < 1 or found != members:
        raise DataError(
            f"a forecast has {found} members, the sums are for {members}: corrections for a finite ensemble need one"
            " number for all cases; score forecasts with other numbers apart"
        )


def _require_equal(kind: str, what: str, mine: object, theirs: object) -> None:
    if mine != theirs:
        raise DataError(f"{kind}: {what} is {mine} in one and {theirs} in the other; score unlike forecasts apart")
