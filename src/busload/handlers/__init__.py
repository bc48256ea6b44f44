"""Which function runs which command, what it is given, and what is hooked in around it."""

from busload.handlers.handle import CommandHandle
from busload.handlers.hooks import CommandFailure

__all__ = ["CommandFailure", "CommandHandle"]
