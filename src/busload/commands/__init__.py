"""One command, from sending to its end."""

from busload.commands.cancel import Cancellation
from busload.commands.execution import ExecutionStatus, OperatorAction
from busload.settings import InputLimits, PayloadLimits

__all__ = [
    "Cancellation",
    "ExecutionStatus",
    "InputLimits",
    "OperatorAction",
    "PayloadLimits",
]
