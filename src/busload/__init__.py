"""A batch-native command bus for PostgreSQL."""

from busload.buffer import Buffer, SyncBuffer
from busload.bus import CommandBus, SyncCommandBus
from busload.domain.batch import BatchCompletionCallback, BatchMetadata, BatchStatus, SyncBatchCompletionCallback
from busload.domain.buffer import BufferStatus, BufferTable
from busload.domain.bulk import Chunk, Group, Item
from busload.domain.cause import CauseGroup, GroupAction, GroupItem
from busload.domain.command import (
    AuditEvent,
    BatchCommand,
    Command,
    CommandMetadata,
    CommandStatus,
    InputLimits,
    SendResult,
    TroubleshootingItem,
)
from busload.domain.dedup import Dedup, task_key
from busload.domain.execution import Execution, ExecutionStatus, OperatorAction
from busload.domain.explanation import Blocker, Explanation, Reason
from busload.domain.pause import Pause
from busload.domain.payload import PayloadLimits
from busload.domain.rate import LimitStatus, RateLimit
from busload.domain.retention import Pruned
from busload.domain.retry import RetryPolicy
from busload.errors import (
    BatchNotFoundError,
    BatchSealedError,
    BusinessRuleError,
    BusloadError,
    CommandNotFoundError,
    DatabaseUnusable,
    DuplicateCommandError,
    DuplicateTaskError,
    HandlerAlreadyRegisteredError,
    InvalidCommandError,
    InvalidOperationError,
    OutcomeUnknown,
    PermanentCommandError,
    Problem,
    RateLimited,
    SchemaOutdated,
    Superseded,
    TransientCommandError,
)
from busload.open_batch import OpenBatch, SyncOpenBatch
from busload.settings import Settings, WorkerSettings
from busload.tracker import SyncTaskTracker, TaskTracker
from busload.worker import (
    ChunkContext,
    Coalescer,
    CoalescerStats,
    HandlerContext,
    SyncChunkContext,
    SyncHandlerContext,
    Worker,
    WorkerStats,
)

__all__ = [
    "AuditEvent",
    "BatchCommand",
    "BatchCompletionCallback",
    "BatchMetadata",
    "BatchNotFoundError",
    "BatchSealedError",
    "BatchStatus",
    "Blocker",
    "Buffer",
    "BufferStatus",
    "BufferTable",
    "BusinessRuleError",
    "BusloadError",
    "CauseGroup",
    "Chunk",
    "ChunkContext",
    "Coalescer",
    "CoalescerStats",
    "Command",
    "CommandBus",
    "CommandMetadata",
    "CommandNotFoundError",
    "CommandStatus",
    "DatabaseUnusable",
    "Dedup",
    "DuplicateCommandError",
    "DuplicateTaskError",
    "Execution",
    "ExecutionStatus",
    "Explanation",
    "Group",
    "GroupAction",
    "GroupItem",
    "HandlerAlreadyRegisteredError",
    "HandlerContext",
    "InputLimits",
    "InvalidCommandError",
    "InvalidOperationError",
    "Item",
    "LimitStatus",
    "OpenBatch",
    "OperatorAction",
    "OutcomeUnknown",
    "Pause",
    "PayloadLimits",
    "PermanentCommandError",
    "Problem",
    "Pruned",
    "RateLimit",
    "RateLimited",
    "Reason",
    "RetryPolicy",
    "SchemaOutdated",
    "SendResult",
    "Settings",
    "Superseded",
    "SyncBatchCompletionCallback",
    "SyncBuffer",
    "SyncChunkContext",
    "SyncCommandBus",
    "SyncHandlerContext",
    "SyncOpenBatch",
    "SyncTaskTracker",
    "TaskTracker",
    "TransientCommandError",
    "TroubleshootingItem",
    "Worker",
    "WorkerSettings",
    "WorkerStats",
    "task_key",
]
