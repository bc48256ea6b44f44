"""Database and broker in step."""

from busload.dispatch.operator import Outbox
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
