"""The same API without await: made by scripts/generate_sync.py from the async modules, never edited by hand."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from busload.batches.batch import SyncBatchCompletionCallback
    from busload.sync.buffer import SyncBuffer
    from busload.sync.handle import SyncCommandHandle
    from busload.sync.open_batch import SyncOpenBatch
    from busload.sync.outbox import SyncOutbox
    from busload.sync.phased_tracker import SyncOldTracker, SyncPhasedTracker
    from busload.sync.steps import SyncFinishedStage

__all__ = [
    "SyncBatchCompletionCallback",
    "SyncBuffer",
    "SyncCommandHandle",
    "SyncFinishedStage",
    "SyncOldTracker",
    "SyncOpenBatch",
    "SyncOutbox",
    "SyncPhasedTracker",
]

_MODULES = {
    "SyncBatchCompletionCallback": "busload.batches.batch",
    "SyncBuffer": "busload.sync.buffer",
    "SyncCommandHandle": "busload.sync.handle",
    "SyncFinishedStage": "busload.sync.steps",
    "SyncOldTracker": "busload.sync.phased_tracker",
    "SyncOpenBatch": "busload.sync.open_batch",
    "SyncOutbox": "busload.sync.outbox",
    "SyncPhasedTracker": "busload.sync.phased_tracker",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for only then: modules below it, such as `sync.pool`, are needed by what it is made of."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
