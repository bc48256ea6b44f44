"""A batch-native command bus for PostgreSQL."""

from busload.bus import CommandBus, SyncCommandBus
from busload.domain.batch import BatchCompletionCallback, BatchMetadata, BatchStatus, SyncBatchCompletionCallback
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
from busload.domain.payload import PayloadLimits
from busload.domain.retry import RetryPolicy
from busload.errors import (
    BatchNotFoundError,
    BatchSealedError,
    BusinessRuleError,
    BusloadError,
    CommandNotFoundError,
    DatabaseUnusable,
    DuplicateCommandError,
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
from busload.worker import Coalescer, CoalescerStats, HandlerContext, SyncHandlerContext, Worker, WorkerStats

__all__ = [
    "AuditEvent",
    "BatchCommand",
    "BatchCompletionCallback",
    "BatchMetadata",
    "BatchNotFoundError",
    "BatchSealedError",
    "BatchStatus",
    "BusinessRuleError",
    "BusloadError",
    "Coalescer",
    "CoalescerStats",
    "Command",
    "CommandBus",
    "CommandMetadata",
    "CommandNotFoundError",
    "CommandStatus",
    "DatabaseUnusable",
    "DuplicateCommandError",
    "HandlerAlreadyRegisteredError",
    "HandlerContext",
    "InputLimits",
    "InvalidCommandError",
    "InvalidOperationError",
    "OpenBatch",
    "OutcomeUnknown",
    "PayloadLimits",
    "PermanentCommandError",
    "Problem",
    "RetryPolicy",
    "SchemaOutdated",
    "SendResult",
    "Settings",
    "Superseded",
    "SyncBatchCompletionCallback",
    "SyncCommandBus",
    "SyncHandlerContext",
    "SyncOpenBatch",
    "TransientCommandError",
    "TroubleshootingItem",
    "Worker",
    "WorkerSettings",
    "WorkerStats",
]
