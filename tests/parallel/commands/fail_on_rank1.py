"""Plugin that makes rank 1 fail to write its first forecast, as on a full disk."""

from __future__ import annotations

import os

from credit.forecast.io.forecast_writer import ForecastWriter


def raise_disk_full(*_: object) -> None:
    """Raise the error of a full disk."""
    raise OSError(28, "No space left on device")


if os.environ["RANK"] == "1":
    ForecastWriter.put = raise_disk_full
