"""Logger for MLflow, on its server or in a database in the run's folder.

The environment variables of MLflow choose server and experiment: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and those
of its credentials. So no secret stands in a config.
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
# Tag by which a restarted run finds its record, because MLflow chooses the ids of its runs itself.
_ID_TAG = "credit.run_id"
# States of a run in MLflow after the states of this package. SCHEDULED is that of a run which will be continued.
_STATUS = {"done": "FINISHED", "requeue": "SCHEDULED", "failed": "FAILED"}
# Limits of MLflow: numbers in a request, parameters in a request, and characters of a parameter.
_MAX_METRICS = 1000
_MAX_PARAMS = 100
_MAX_PARAM_LENGTH = 500


@register_logger("mlflow")
class MlflowLogger(RunLogger):
    """Logger for MLflow. Without MLFLOW_TRACKING_URI, it writes ``mlflow.db`` and ``mlflow/`` in the run's folder."""

    package = "mlflow"
    extra = "mlflow"

    def start(self, run: LoggedRun) -> str:
        """Begin a run with the values of the config as parameters, or continue the run with the id's tag."""
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        # A server that does not answer is reported by one warning, not by one for each attempt.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        address = os.environ.get("MLFLOW_TRACKING_URI")
        artifact_address = None
        if not address:
            address = f"sqlite:///{run.folder.absolute()}/mlflow.db"
            # By default, figures would go into the folder in which the command was called.
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
        """Return the id of the experiment that the environment names; it is created if it does not exist.

        Args:
            artifact_address: address of the files of a new experiment; None for the default of the server.
        """
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _DEFAULT_EXPERIMENT)
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            return experiment.experiment_id
        return self._client.create_experiment(name, artifact_location=artifact_address)

    def log(self, rows: Sequence[LoggedRow]) -> None:
        """Add the rows with as few requests as possible."""
        from mlflow.entities import Metric

        milliseconds = int(time.time() * 1000)
        metrics = []
        for row in rows:
            for name, value in row.metrics.items():
                metrics.append(Metric(_clean_name(name), value, milliseconds, row.step))
        for start in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MAX_METRICS])

    def log_image(self, picture: LoggedPicture) -> None:
        """Add the picture to the artifacts, in a folder for its step."""
        with Image.open(BytesIO(picture.png)) as image:
            self._client.log_image(self._run_id, image, f"step_{picture.step:08d}/{picture.name}.png")

    def close(self, status: str) -> None:
        """Set the state of the run."""
        # MLflow would take a run that is only interrupted for ended, and `set_terminated` would give it an end time.
        if status == "requeue":
            self._client.update_run(self._run_id, status=_STATUS[status])
        else:
            self._client.set_terminated(self._run_id, _STATUS[status])


def _clean_name(name: str) -> str:
    """Return a name in the characters that MLflow allows, such as ``blocks._.norm`` for ``blocks.*.norm``."""
    return re.sub(r"[^\w.:/ -]", "_", name)


def _iterate_params(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, value as text) of a config and its sections."""
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _iterate_params(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)
