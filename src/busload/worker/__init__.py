"""What runs: a worker claims commands, runs their handlers, and settles the results."""

from busload.worker.coalescer import Coalescer
from busload.worker.context import ChunkContext, HandlerContext, SyncChunkContext, SyncHandlerContext
from busload.worker.stats import CoalescerStats, WorkerStats
from busload.worker.worker import Worker

__all__ = [
    "ChunkContext",
    "Coalescer",
    "CoalescerStats",
    "HandlerContext",
    "SyncChunkContext",
    "SyncHandlerContext",
    "Worker",
    "WorkerStats",
]
