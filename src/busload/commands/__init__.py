"""One command, from sending to its end."""

from busload.commands.execution import ExecutionStatus, OperatorAction
from busload.settings import InputLimits, PayloadLimits

__all__ = [
    "ExecutionStatus",
    "InputLimits",
    "OperatorAction",
    "PayloadLimits",
]
