"""Celery: the tasks of an application, and the calls that send them, stay as they are; busload sends and runs them.

bridge = CeleryBridge(app, bus)  # from here on, `task.delay(...)` sends a command
bridge.register()                # where a worker starts: each task is a handler of the bus
"""

from __future__ import annotations

from busload.integrations.celery.bridge import CeleryBridge
from busload.integrations.celery.result import CommandResult

__all__ = ["CeleryBridge", "CommandResult"]
