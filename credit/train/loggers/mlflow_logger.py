"""Logger for MLflow, with an MLflow server or a database in the run folder.

The environment variables of MLflow contain the server, the experiment and the credentials: MLFLOW_TRACKING_URI,
MLFLOW_EXPERIMENT_NAME and others. So a config contains no secrets.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any

from PIL import Image

from credit.train.loggers.base import LoggedPicture, LoggedRow, LoggedRun, RunLogger, register_logger

_DEFAULT_EXPERIMENT = "credit"
# Tag with which a restarted run finds its MLflow run, because MLflow itself chooses the ids of MLflow runs.
_ID_TAG = "credit.run_id"
# Status of a run in credit -> status of the run in MLflow. SCHEDULED means that the run will be continued.
_STATUS = {"done": "FINISHED", "requeue": "SCHEDULED", "failed": "FAILED"}
# Limits of MLflow: metrics per request, parameters per request, and characters per parameter.
_MAX_METRICS = 1000
_MAX_PARAMS = 100
_MAX_PARAM_LENGTH = 500


@register_logger("mlflow")
class MlflowLogger(RunLogger):
    """Logger for MLflow.

    If MLFLOW_TRACKING_URI is not set, the logger writes ``mlflow.db`` and ``mlflow/`` into the run folder.
    """

    package = "mlflow"
    extra = "mlflow"

    def start(self, run: LoggedRun) -> str:
        """Create an MLflow run with the values of the config as parameters, or continue the MLflow run of this id."""
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        # If the server does not answer, one warning is enough; urllib3 would log a warning for each attempt.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        address = os.environ.get("MLFLOW_TRACKING_URI")
        artifact_address = None
        if not address:
            address = f"sqlite:///{run.folder.absolute()}/mlflow.db"
            # By default, MLflow would write figures into the current working directory.
            artifact_address = (run.folder.absolute() / "mlflow").as_uri()
        self._client: Any = MlflowClient(address)
        experiment_id = self._find_experiment(artifact_address)
        runs = self._client.search_runs([experiment_id], f"tags.`{_ID_TAG}` = '{run.run_id}'", max_results=1)
        if runs:
            self._run_id = runs[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            record = self._client.create_run(experiment_id, tags={_ID_TAG: run.run_id}, run_name=run.name)
            self._run_id = record.info.run_id
            values = {_clean_name(key): value for key, value in _iterate_params(run.config, "")}
            params = [Param(name, value[:_MAX_PARAM_LENGTH]) for name, value in values.items()]
            for start in range(0, len(params), _MAX_PARAMS):
                self._client.log_batch(self._run_id, params=params[start : start + _MAX_PARAMS])
        if artifact_address is not None:
            return f"mlflow ui --backend-store-uri {address}"
        return f"run {self._run_id} at {address}"

    def _find_experiment(self, artifact_address: str | None) -> str:
        """Return the id of the experiment in MLFLOW_EXPERIMENT_NAME; create the experiment if it does not exist.

        Args:
            artifact_address: address of the files of a new experiment; None for the default of the server.
        """
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _DEFAULT_EXPERIMENT)
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            return experiment.experiment_id
        return self._client.create_experiment(name, artifact_location=artifact_address)

    def log(self, rows: Sequence[LoggedRow]) -> None:
        """Send the rows to MLflow with as few requests as possible."""
        from mlflow.entities import Metric

        milliseconds = int(time.time() * 1000)
        metrics = []
        for row in rows:
            for name, value in row.metrics.items():
                metrics.append(Metric(_clean_name(name), value, milliseconds, row.step))
        for start in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MAX_METRICS])

    def log_image(self, picture: LoggedPicture) -> None:
        """Add the picture to the artifacts of the MLflow run, in a folder for the step of the picture."""
        with Image.open(BytesIO(picture.png)) as image:
            self._client.log_image(self._run_id, image, f"step_{picture.step:08d}/{picture.name}.png")

    def close(self, status: str) -> None:
        """Set the status of the MLflow run."""
        # `set_terminated` would set an end time, so it is not used for a run that will be continued.
        if status == "requeue":
            self._client.update_run(self._run_id, status=_STATUS[status])
        else:
            self._client.set_terminated(self._run_id, _STATUS[status])


def _clean_name(name: str) -> str:
    """Replace characters that MLflow does not allow with "_": return ``blocks._.norm`` for ``blocks.*.norm``."""
    return re.sub(r"[^\w.:/ -]", "_", name)


def _iterate_params(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, value as a string) for each value in a section of a config and in its subsections."""
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _iterate_params(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)
