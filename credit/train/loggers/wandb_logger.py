"""Logger for Weights & Biases, with the wandb server or offline.

The environment variables of wandb contain the account, the project and the mode: WANDB_API_KEY, WANDB_ENTITY,
WANDB_PROJECT and WANDB_MODE. So a config contains no secrets.
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
# Seconds for which wandb tries to reach its server at the start.
_START_SECONDS = 60


@register_logger("wandb")
class WandbLogger(RunLogger):
    """Logger for Weights & Biases, which writes its files into ``wandb/`` in the run folder."""

    package = "wandb"
    extra = "wandb"

    def start(self, run: LoggedRun) -> str:
        """Create or continue the wandb run with the id of the run.

        Returns:
            The address of the wandb run; offline, the command that uploads the wandb run later.

        Raises:
            CreditError: if wandb is online and has no API key.
        """
        import wandb

        settings = wandb.Settings(
            # wandb must not write to the terminal, because the progress bar uses it. Git and code are not recorded.
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            init_timeout=_START_SECONDS,
        )
        is_offline = os.environ.get("WANDB_MODE") in ("offline", "dryrun", "disabled")
        # Without an API key, `wandb.init` would prompt for it on the terminal during training.
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
        # wandb rejects values of steps before the last logged step, but a killed run repeats some steps. With a
        # separate metric as x axis, the repeated values appear at the same x as the values of the earlier start.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        if is_offline:
            return f"wandb sync {Path(self._run.dir).parent}"
        return str(self._run.url)

    def log(self, rows: Sequence[LoggedRow]) -> None:
        """Add the rows to the wandb run; a separate process of wandb sends them to the server."""
        for row in rows:
            self._run.log({**row.metrics, "step": row.step})

    def log_image(self, picture: LoggedPicture) -> None:
        """Add the picture to the image series with the name of the picture."""
        with Image.open(BytesIO(picture.png)) as image:
            self._run.log({picture.name: self._wandb.Image(image), "step": picture.step})

    def close(self, status: str) -> None:
        """Upload the remaining data, and mark the wandb run as failed if the status is ``failed``."""
        self._run.finish(exit_code=1 if status == "failed" else 0)
