"""Logger that writes TensorBoard files into the run folder."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from credit.train.loggers.base import LoggedPicture, LoggedRow, LoggedRun, RunLogger, register_logger


@register_logger("tensorboard")
class TensorBoardLogger(RunLogger):
    """Logger that writes TensorBoard files into ``tensorboard/`` in the run's folder."""

    package = "tensorboard"
    extra = "tensorboard"

    def start(self, run: LoggedRun) -> str:
        """Open the files, and hide values of steps after ``run.first_step`` that an earlier start logged."""
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        self._writer: Any = SummaryWriter(str(folder), purge_step=run.first_step + 1)
        return f"tensorboard --logdir {folder}"

    def log(self, rows: Sequence[LoggedRow]) -> None:
        """Add each value of the rows to the curve with the name of the metric."""
        for row in rows:
            for name, value in row.metrics.items():
                self._writer.add_scalar(name, value, row.step)

    def log_image(self, picture: LoggedPicture) -> None:
        """Add the picture to the image series with the name of the picture."""
        with Image.open(BytesIO(picture.png)) as image:
            pixels_HWC = np.asarray(image.convert("RGB"))
        self._writer.add_image(picture.name, pixels_HWC, picture.step, dataformats="HWC")

    def close(self, status: str) -> None:
        """Write all buffered data and close the files; TensorBoard files contain no status of the run."""
        self._writer.close()
