"""Database and broker in step."""

from busload.dispatch.api import Outbox
from busload.dispatch.strategy import DispatchReport, DispatchStatus, OutboxEntry, Reconciliation, Recovered, Strategy

__all__ = [
    "DispatchReport",
    "DispatchStatus",
    "Outbox",
    "OutboxEntry",
    "Reconciliation",
    "Recovered",
    "Strategy",
]
