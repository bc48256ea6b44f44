"""Tasks that other queues run: their tracker, their messages, and the way from another tracker to this one."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from busload.tasks.message import TaskMessage

if TYPE_CHECKING:
    from busload.tasks.phase import Answers, Phase, PhaseReport
    from busload.tasks.phased_tracker import OldTracker, PhasedTracker

__all__ = ["Answers", "OldTracker", "Phase", "PhaseReport", "PhasedTracker", "TaskMessage"]

_MODULES = {
    "Answers": "busload.tasks.phase",
    "OldTracker": "busload.tasks.phased_tracker",
    "Phase": "busload.tasks.phase",
    "PhaseReport": "busload.tasks.phase",
    "PhasedTracker": "busload.tasks.phased_tracker",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for only then: every bus knows how to explain a task, and few have an old tracker."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
