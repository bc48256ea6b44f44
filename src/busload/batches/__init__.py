"""Batches: created at once, filled over time, canceled, awaited."""

from busload.batches.batch import BatchCompletionCallback
from busload.batches.open_batch import OpenBatch

__all__ = ["BatchCompletionCallback", "OpenBatch"]
