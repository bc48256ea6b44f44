"""A batch-native command bus for PostgreSQL: the names that most programs need. Its folders offer the rest."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from busload.batches.batch import BatchMetadata as BatchMetadata
    from busload.batches.batch import BatchStatus as BatchStatus
    from busload.batches.batch import BatchType as BatchType
    from busload.bus import CommandBus as CommandBus
    from busload.commands.bulk_items import Chunk as Chunk
    from busload.commands.bulk_items import Group as Group
    from busload.commands.bulk_items import Item as Item
    from busload.commands.command import AuditEvent as AuditEvent
    from busload.commands.command import BatchCommand as BatchCommand
    from busload.commands.command import Command as Command
    from busload.commands.command import CommandMetadata as CommandMetadata
    from busload.commands.command import CommandStatus as CommandStatus
    from busload.commands.command import SendResult as SendResult
    from busload.commands.command import TroubleshootingItem as TroubleshootingItem
    from busload.commands.dedup import Dedup as Dedup
    from busload.commands.dedup import task_key as task_key
    from busload.commands.execution import Execution as Execution
    from busload.commands.retry import RetryPolicy as RetryPolicy
    from busload.errors import BatchNotFoundError as BatchNotFoundError
    from busload.errors import BusinessRuleError as BusinessRuleError
    from busload.errors import BusloadError as BusloadError
    from busload.errors import DuplicateCommandError as DuplicateCommandError
    from busload.errors import InvalidCommandError as InvalidCommandError
    from busload.errors import PermanentCommandError as PermanentCommandError
    from busload.errors import RateLimitedError as RateLimitedError
    from busload.errors import TransientCommandError as TransientCommandError
    from busload.handlers.methods import bulk_handler as bulk_handler
    from busload.handlers.methods import handler as handler
    from busload.handlers.methods import planner as planner
    from busload.jobs.job import BatchJob as BatchJob
    from busload.jobs.job import Stage as Stage
    from busload.limits.concurrency import ConcurrencyLimit as ConcurrencyLimit
    from busload.limits.rate import RateLimit as RateLimit
    from busload.postgres import schema as schema
    from busload.settings import Settings as Settings
    from busload.settings import WorkerSettings as WorkerSettings
    from busload.sync.bus import SyncCommandBus as SyncCommandBus
    from busload.sync.tracker import SyncTaskTracker as SyncTaskTracker
    from busload.tasks.tracker import TaskTracker as TaskTracker
    from busload.worker import ChunkContext as ChunkContext
    from busload.worker import HandlerContext as HandlerContext
    from busload.worker import SyncChunkContext as SyncChunkContext
    from busload.worker import SyncHandlerContext as SyncHandlerContext
    from busload.worker import Worker as Worker
else:
    # `busload --help` and tab completion need none of these names, and importing them all takes half a second.

    def __getattr__(name: str) -> object:
        """Import a public name, or a module of the package, when it is first used."""
        if name in _HOMES:
            found = getattr(import_module(_HOMES[name]), name)
        elif name == "schema":
            found = import_module("busload.postgres.schema")
        elif not name.startswith("_") and find_spec(f"{__name__}.{name}"):
            found = import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES, "schema"})


_NAMES = {
    "batches.batch": "BatchMetadata BatchStatus BatchType",
    "bus": "CommandBus",
    "commands.bulk_items": "Chunk Group Item",
    "commands.command": "AuditEvent BatchCommand Command CommandMetadata CommandStatus SendResult TroubleshootingItem",
    "commands.dedup": "Dedup task_key",
    "commands.execution": "Execution",
    "commands.retry": "RetryPolicy",
    "errors": "BatchNotFoundError BusinessRuleError BusloadError DuplicateCommandError InvalidCommandError"
    " PermanentCommandError RateLimitedError TransientCommandError",
    "handlers.methods": "bulk_handler handler planner",
    "jobs.job": "BatchJob Stage",
    "limits.concurrency": "ConcurrencyLimit",
    "limits.rate": "RateLimit",
    "settings": "Settings WorkerSettings",
    "sync.bus": "SyncCommandBus",
    "sync.tracker": "SyncTaskTracker",
    "tasks.tracker": "TaskTracker",
    "worker": "ChunkContext HandlerContext SyncChunkContext SyncHandlerContext Worker",
}
_HOMES = {name: f"busload.{module}" for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOMES)
