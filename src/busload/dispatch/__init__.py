"""Database and broker in step."""

from busload.dispatch.api import Outbox
from busload.dispatch.outbox import OutboxEntry
from busload.dispatch.reconcile import Reconciliation
from busload.dispatch.relay import Recovered
from busload.dispatch.report import PublishingReport
from busload.dispatch.strategy import DispatchReport, DispatchStatus, Strategy

__all__ = [
    "DispatchReport",
    "DispatchStatus",
    "Outbox",
    "OutboxEntry",
    "PublishingReport",
    "Reconciliation",
    "Recovered",
    "Strategy",
]
