"""One command, from sending to its end."""

from busload.commands.cancel import Cancellation
from busload.commands.execution import ExecutionStatus, OperatorAction
from busload.commands.listing import CommandPage
from busload.commands.send_middleware import SendCall
from busload.settings import InputLimits, PayloadLimits

__all__ = [
    "Cancellation",
    "CommandPage",
    "ExecutionStatus",
    "InputLimits",
    "OperatorAction",
    "PayloadLimits",
    "SendCall",
]
