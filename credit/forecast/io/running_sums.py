"""Running sums of output variables over the steps of a forecast.

Shape suffixes: C channels, H rows, W columns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from credit.forecast.rollout import ForecastStart


@dataclass(frozen=True)
class RunningSum:
    """Definition of the sum of one channel over several steps.

    Attributes:
        channel_index: index of the channel in the model's output.
        num_steps: number of steps in the sum, up to the lead time; None for all steps since the initial time.
    """

    channel_index: int
    num_steps: int | None


class RunningSums:
    """Running sums of all forecasts in progress.

    Args:
        sums: definitions of the sums to compute for each forecast.
        last_lead: last lead time in minutes; after this lead time, the sums of a forecast are deleted.

    Attributes:
        num_sums: number of sums per forecast.
    """

    def __init__(self, sums: Sequence[RunningSum], last_lead: int) -> None:
        self.num_sums = len(sums)
        self._sums = tuple(sums)
        self._last_lead = last_lead
        # (initial time, member) -> a queue for each sum. The queue contains the fields of the sum's window, or the sum
        # since the initial time as a single field.
        self._earlier_fields: dict[tuple[int, int], list[deque[np.ndarray]]] = {}

    def reset(self) -> None:
        """Delete the sums of all forecasts, so that forecasts can be restarted."""
        self._earlier_fields.clear()

    def accumulate(self, start: ForecastStart, lead_minutes: int, fields_CHW: np.ndarray) -> list[np.ndarray]:
        """Add the fields of a step, and return the sums at the lead time of the step.

        Args:
            start: start of the forecast.
            lead_minutes: lead time in minutes. The method must be called for every step of a forecast, in order.
            fields_CHW: the network's output in physical units.

        Returns:
            Each sum, (1, H, W) float32; NaN while the forecast has fewer steps than the sum.
        """
        if not self._sums:
            return []
        key = (start.initial_minutes, start.member)
        if key not in self._earlier_fields:
            # For a sum since the initial time, the queue contains a single field: the sum up to the last step.
            self._earlier_fields[key] = [deque(maxlen=running_sum.num_steps or 1) for running_sum in self._sums]
        totals = []
        for running_sum, earlier in zip(self._sums, self._earlier_fields[key], strict=True):
            field_HW = fields_CHW[running_sum.channel_index].astype(np.float64)
            if running_sum.num_steps is None:
                total_HW = field_HW
                if earlier:
                    total_HW = field_HW + earlier[0]
                earlier.append(total_HW)
            else:
                earlier.append(field_HW)
                total_HW = np.full_like(field_HW, np.nan)
                if len(earlier) == running_sum.num_steps:
                    total_HW = sum(earlier)
            totals.append(total_HW.astype(np.float32)[None])
        if lead_minutes >= self._last_lead:
            del self._earlier_fields[key]
        return totals
