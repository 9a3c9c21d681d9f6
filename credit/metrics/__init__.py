"""Metrics of the validation during training (``trainer.metrics``)."""

from credit.metrics.base import Metric, MetricContext, find_metric_class, register_metric

__all__ = ["Metric", "MetricContext", "find_metric_class", "register_metric"]
