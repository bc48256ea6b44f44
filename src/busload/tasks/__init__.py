"""Tasks that other queues run: their tracker, their messages, and a comparison with another tracker."""

from busload.tasks.message import TaskMessage

__all__ = ["TaskMessage"]
