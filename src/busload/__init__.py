"""A batch-native command bus for PostgreSQL."""

from busload.bus import CommandBus, SyncCommandBus
from busload.domain.batch import BatchCompletionCallback, BatchMetadata, BatchStatus, SyncBatchCompletionCallback
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
    SchemaOutdated,
    Superseded,
    TransientCommandError,
)
from busload.open_batch import OpenBatch, SyncOpenBatch
from busload.settings import Settings, WorkerSettings
from busload.tracker import SyncTaskTracker, TaskTracker
from busload.worker import Coalescer, CoalescerStats, HandlerContext, SyncHandlerContext, Worker, WorkerStats

__all__ = [
    "AuditEvent",
    "BatchCommand",
    "BatchCompletionCallback",
    "BatchMetadata",
    "BatchNotFoundError",
    "BatchSealedError",
    "BatchStatus",
    "Blocker",
    "BusinessRuleError",
    "BusloadError",
    "CauseGroup",
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
    "GroupAction",
    "GroupItem",
    "HandlerAlreadyRegisteredError",
    "HandlerContext",
    "InputLimits",
    "InvalidCommandError",
    "InvalidOperationError",
    "OpenBatch",
    "OperatorAction",
    "OutcomeUnknown",
    "Pause",
    "PayloadLimits",
    "PermanentCommandError",
    "Problem",
    "Pruned",
    "Reason",
    "RetryPolicy",
    "SchemaOutdated",
    "SendResult",
    "Settings",
    "Superseded",
    "SyncBatchCompletionCallback",
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
