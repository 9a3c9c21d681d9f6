"""Train, run and score global AI weather models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from credit.api import (
        Model,
        Variable,
        load,
        make_products,
        open_sample,
        plot_map,
        plot_metrics,
        plot_scores,
        read_metrics,
        score,
    )

__version__ = "0.24.0"

__all__ = [
    "Model",
    "Variable",
    "__version__",
    "load",
    "make_products",
    "open_sample",
    "plot_map",
    "plot_metrics",
    "plot_scores",
    "read_metrics",
    "score",
]


def __getattr__(name: str) -> Any:
    # The Python interface imports torch, so it is imported only when it is used. Commands therefore start fast.
    if name in __all__:
        return getattr(import_module("credit.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
