"""What runs: a worker claims commands, runs their handlers, and settles the results."""

from busload.worker.coalescer import Coalescer
from busload.worker.context import HandlerContext, SyncHandlerContext
from busload.worker.stats import CoalescerStats, WorkerStats
from busload.worker.worker import Worker

__all__ = ["Coalescer", "CoalescerStats", "HandlerContext", "SyncHandlerContext", "Worker", "WorkerStats"]
