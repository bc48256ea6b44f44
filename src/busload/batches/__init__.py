"""Batches: created at once, filled over time, canceled, awaited."""

from busload.batches.batch import BatchCompletionCallback
from busload.batches.forecast import Forecast, NoForecast
from busload.batches.guards import Canary, FailureBudget
from busload.batches.open_batch import OpenBatch

__all__ = ["BatchCompletionCallback", "Canary", "FailureBudget", "Forecast", "NoForecast", "OpenBatch"]
