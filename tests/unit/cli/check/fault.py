"""A fault that ``credit_check`` must find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """A fault, and what must be said of it.

    Attributes:
        name: what is wrong.
        words: all of them must stand in one problem.
        overrides: of the config; paths are relative to the world's folder.
        spoil: changes files; it gets the folder.
        needs: ``store`` for a complete store, ``run`` for a run of two steps with a checkpoint.
        arguments: further ones of the command.
        environ: variables.
        free: bytes that every disk has left, None for the truth.
        absent: a module that is not installed.
        count: number of problems, where one fault has several faces.
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
