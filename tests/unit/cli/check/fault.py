"""Description of a fault that ``credit check`` must report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """Fault and the error message that the command must print.

    Attributes:
        name: description of the fault, used as the id of the test.
        words: parts of one error message.
        overrides: overrides of the config; paths are relative to the world's folder.
        spoil: function that introduces the fault into the files of a folder.
        needs: ``store`` for a world with a complete store, ``run`` for one with a run of two steps, empty for neither.
        arguments: further arguments of the command.
        environ: environment variables to set.
        free: free bytes of every disk, None for the real number.
        absent: name of a module whose import must fail, as if it were not installed.
        count: number of errors that the fault causes.
    """

    name: str
    words: Sequence[str]
    overrides: Sequence[str] = ()
    spoil: Callable[[Path], object] = lambda folder: None
    needs: str = ""
    arguments: Sequence[str] = ()
    environ: dict[str, str] = field(default_factory=dict)
    free: int | None = None
    absent: str = ""
    count: int = 1

    def __str__(self) -> str:
        return self.name
