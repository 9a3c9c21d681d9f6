"""Base class of loggers, and the registry of the loggers that ``trainer.loggers`` may list."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from credit.config.registry import register_class
from credit.errors import ConfigError, did_you_mean
from credit.utils.installation import install_command


@dataclass(frozen=True)
class LoggedRun:
    """Description of a run for its loggers.

    Attributes:
        name: name of the run, from the config key `experiment`.
        run_id: string that identifies the run. It stays the same after a restart, so that the logger can continue the
            same record of the run.
        folder: folder of the run.
        config: config with all defaults as plain values; secrets are hidden.
        first_step: number of optimizer steps that the run took before this start.
    """

    name: str
    run_id: str
    folder: Path
    config: Mapping[str, Any]
    first_step: int


@dataclass(frozen=True)
class LoggedRow:
    """Metrics of one optimizer step or validation.

    Attributes:
        step: number of optimizer steps taken.
        metrics: name -> finite number.
    """

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class LoggedPicture:
    """Picture that belongs to one optimizer step of a run.

    Attributes:
        name: name of the picture, the same for all steps.
        png: content of the PNG file.
        step: number of optimizer steps taken.
    """

    name: str
    png: bytes
    step: int


class RunLogger(ABC):
    """Base class of loggers.

    Only the main process has loggers. `credit.train.loggers.background.BackgroundLogger` calls all methods in a
    separate thread, so a method may wait for a network without slowing down training. An error that a method raises is
    logged as a warning, and training continues.

    Attributes:
        package: import name of the package that the logger needs.
        extra: extra in ``setup.cfg`` that installs this package; empty for loggers of plugins.
    """

    package: ClassVar[str]
    extra: ClassVar[str] = ""

    @abstractmethod
    def start(self, run: LoggedRun) -> str:
        """Create a record of the run in the logger's program or service, or continue the record of an earlier start.

        If an earlier start was killed after its last checkpoint, rows of steps after ``run.first_step`` are logged
        again.

        Returns:
            The address or command with which the user can see the metrics.
        """

    @abstractmethod
    def log(self, rows: Sequence[LoggedRow]) -> None:
        """Add rows of metrics, in the order of their steps, to the logger's record of the run."""

    def log_image(self, picture: LoggedPicture) -> None:  # noqa: B027
        """Add a picture, such as a figure of a preview; the default implementation ignores it."""

    @abstractmethod
    def close(self, status: str) -> None:
        """Complete the logger's record of the run.

        Args:
            status: ``done``, ``requeue`` if the run will be continued, or ``failed``.
        """


LoggerClass = TypeVar("LoggerClass", bound=type[RunLogger])
_LOGGERS: dict[str, type[RunLogger]] = {}


def register_logger(name: str) -> Callable[[LoggerClass], LoggerClass]:
    """Class decorator that makes a logger available in ``trainer.loggers``.

    Args:
        name: entry of ``trainer.loggers`` in a config.

    Raises:
        ConfigError: if a different class has the same name, or if the class does not derive from `RunLogger`.
    """

    def register(cls: LoggerClass) -> LoggerClass:
        return register_class(_LOGGERS, "logger", name, cls, RunLogger)

    return register


def find_logger_class(name: str) -> type[RunLogger]:
    """Return the logger class for a name in ``trainer.loggers``.

    Raises:
        ConfigError: if no logger has the name; the message suggests the most similar name.
    """
    # The import registers the built-in loggers. They import their packages only when they start.
    import credit.train.loggers.mlflow_logger
    import credit.train.loggers.tensorboard_logger
    import credit.train.loggers.wandb_logger  # noqa: F401

    if name not in _LOGGERS:
        raise ConfigError(f'trainer.loggers: "{name}" is not a logger{did_you_mean(name, _LOGGERS)}')
    return _LOGGERS[name]


def require_loggers(names: Iterable[str]) -> None:
    """Raise ConfigError unless all loggers exist and their packages are installed.

    Args:
        names: entries of ``trainer.loggers``.

    Raises:
        ConfigError: if a name is unknown, or a package is missing.
    """
    for name in names:
        cls = find_logger_class(name)
        if importlib.util.find_spec(cls.package) is None:
            remedy = "install it"
            if cls.extra:
                remedy = f"install it with: {install_command(cls.extra)}"
            raise ConfigError(f"trainer.loggers: {name} needs the package {cls.package}; {remedy}")
