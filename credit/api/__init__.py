"""Interface of the package for Python programs and notebooks; the names can also be imported from `credit`."""

from credit.api.datasets import open_sample
from credit.api.figures import plot_map, plot_metrics, plot_scores
from credit.api.loading import load
from credit.api.model import Model
from credit.api.products import make_products
from credit.api.runs import read_metrics
from credit.api.scoring import score
from credit.api.variables import Variable

__all__ = [
    "Model",
    "Variable",
    "load",
    "make_products",
    "open_sample",
    "plot_map",
    "plot_metrics",
    "plot_scores",
    "read_metrics",
    "score",
]
