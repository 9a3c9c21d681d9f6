"""Loggers that send the metrics of a run to TensorBoard, Weights & Biases, MLflow, or the service of a plugin."""

from credit.train.loggers.base import LoggedPicture, LoggedRow, LoggedRun, RunLogger, register_logger

__all__ = ["LoggedPicture", "LoggedRow", "LoggedRun", "RunLogger", "register_logger"]
