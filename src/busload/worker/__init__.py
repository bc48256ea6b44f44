"""What runs: a worker claims commands, runs their handlers, and settles the results."""

from busload.sync.context import SyncChunkContext, SyncHandlerContext
from busload.worker.coalescer import Coalescer
from busload.worker.context import ChunkContext, HandlerContext
from busload.worker.stats import BrokerStats, CoalescerStats, HandlerStats, OutboxStats, WorkerStats
from busload.worker.worker import Worker

__all__ = [
    "BrokerStats",
    "ChunkContext",
    "Coalescer",
    "CoalescerStats",
    "HandlerContext",
    "HandlerStats",
    "OutboxStats",
    "SyncChunkContext",
    "SyncHandlerContext",
    "Worker",
    "WorkerStats",
]
