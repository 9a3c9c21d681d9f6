"""Logger for Weights & Biases, on its server or offline.

The environment variables of wandb choose account, project and mode: WANDB_API_KEY, WANDB_ENTITY, WANDB_PROJECT and
WANDB_MODE. So no secret stands in a config.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from credit.errors import CreditError
from credit.train.loggers.base import LoggedPicture, LoggedRow, LoggedRun, RunLogger, register_logger

_DEFAULT_PROJECT = "credit"
# Seconds after which wandb gives up to reach its server at the start.
_START_SECONDS = 60


@register_logger("wandb")
class WandbLogger(RunLogger):
    """Logger for Weights & Biases. Its files are in ``wandb/`` in the run's folder."""

    package = "wandb"
    extra = "wandb"

    def start(self, run: LoggedRun) -> str:
        """Begin or continue the run of this id, and return its address, or the command that uploads it later.

        Raises:
            CreditError: if wandb is online and has no API key.
        """
        import wandb

        settings = wandb.Settings(
            # The terminal belongs to the progress bar of the training, and git and code are not asked for.
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            init_timeout=_START_SECONDS,
        )
        is_offline = os.environ.get("WANDB_MODE") in ("offline", "dryrun", "disabled")
        # Without a key, `wandb.init` would ask for it on the terminal in the middle of the training.
        if not is_offline and not wandb.login(prompt=False):
            raise CreditError("no API key; run `wandb login` once, or set WANDB_MODE=offline and upload later")
        self._wandb: Any = wandb
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _DEFAULT_PROJECT),
            id=run.run_id,
            name=run.name,
            dir=str(run.folder),
            config=dict(run.config),
            resume="allow",
            settings=settings,
        )
        # wandb refuses values of steps before the last one, but a killed run repeats some steps. With an x axis of its
        # own, the repeated values lie on those of the earlier start.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        if is_offline:
            return f"wandb sync {Path(self._run.dir).parent}"
        return str(self._run.url)

    def log(self, rows: Sequence[LoggedRow]) -> None:
        """Add the rows; wandb sends them from a process of its own."""
        for row in rows:
            self._run.log({**row.metrics, "step": row.step})

    def log_image(self, picture: LoggedPicture) -> None:
        """Add the picture to the images of its name."""
        with Image.open(BytesIO(picture.png)) as image:
            self._run.log({picture.name: self._wandb.Image(image), "step": picture.step})

    def close(self, status: str) -> None:
        """Upload the rest. A run that failed is marked as such."""
        self._run.finish(exit_code=1 if status == "failed" else 0)
