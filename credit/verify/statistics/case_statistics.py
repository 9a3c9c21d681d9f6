"""CaseSums: sums that are kept case by case, so that parts join and seasons and resampling choose among the cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Self

import numpy as np

from credit.errors import DataError


@dataclass
class CaseStatistics:
    """Area means of each case of one forecast, float64 arrays whose first two dimensions are cases and lead times.

    Attributes:
        initial: (N,) initial times in minutes, increasing.
        members: number of members of an ensemble; 1 of a single forecast.
    """

    initial: np.ndarray
    members: int = field(default=1, kw_only=True)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Return the cases of all parts in the order of their times, whatever the order of the parts.

        Raises:
            DataError: if two parts have the same case, or ensembles of different size.
        """
        initial = np.concatenate([part.initial for part in parts])
        order = np.argsort(initial)
        if (np.diff(initial[order]) == 0).any():
            raise DataError("scores of two parts cannot be joined: they have an initial time in common")
        members = {part.members for part in parts}
        if len(members) > 1:
            raise DataError(f"scores of ensembles of {members} members cannot be joined: they depend on the number")
        planes = {name: np.concatenate([getattr(part, name) for part in parts])[order] for name in cls.plane_names()}
        return cls(initial[order], **planes, members=members.pop())

    def select(self, cases: np.ndarray) -> Self:
        """Return the chosen cases; `cases` is (N,) bool."""
        return replace(self, initial=self.initial[cases], **{name: own[cases] for name, own in self.planes().items()})

    def _require_members(self, found: int) -> None:
        """Refuse a case whose number of members is not that of the others.

        Raises:
            DataError: if the two numbers differ, or there is no member.
        """
        if self.members < 1 or found != self.members:
            raise DataError(
                f"a forecast has {found} members, the sums are for {self.members}: corrections for a finite ensemble "
                "need one number for all cases; score forecasts with other numbers apart"
            )

    @classmethod
    def plane_names(cls) -> list[str]:
        """Return the names of what is summed."""
        return [own.name for own in fields(cls) if own.name not in ("initial", "members")]

    def planes(self) -> dict[str, np.ndarray]:
        """Return what is summed by name, each (N, L, ...)."""
        return {name: getattr(self, name) for name in self.plane_names()}

    def resampled(self) -> dict[str, np.ndarray]:
        """Return the planes that intervals are made of, each (N, L, X, R)."""
        return self.planes()

    def metrics(self) -> dict[str, np.ndarray]:
        """Return metric -> (L, X, R)."""
        raise NotImplementedError

    def metrics_of(self, means: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the metrics that are functions of means over cases of the `resampled` planes, of any shape."""
        raise NotImplementedError

    def contributions(
        self, cases: Mapping[str, np.ndarray], means: Mapping[str, np.ndarray], metrics: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return metric -> (N, X, R), what each case contributes to it, to first order and up to a factor.

        Args:
            cases: the `resampled` planes at one lead time, each (N, X, R).
            means: their means over cases.
            metrics: `metrics_of` these.
        """
        raise NotImplementedError
