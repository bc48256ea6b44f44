"""Metrics for Prometheus: of the whole database, and the alert rules and the Grafana dashboard that use them."""

from busload.metrics.database import Metrics
from busload.metrics.exposition import Metric, Sample

__all__ = ["Metric", "Metrics", "Sample"]
