"""Metrics for validation during training (``trainer.metrics``)."""

from credit.metrics.base import Metric, MetricContext, metric_class, register_metric

__all__ = ["Metric", "MetricContext", "metric_class", "register_metric"]
