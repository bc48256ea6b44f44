"""Made from busload.metrics.api by scripts/generate_sync.py. Change the source instead."""

from __future__ import annotations

from busload.metrics import database
from busload.metrics.database import Metrics
from busload.sync.database import Database


class MetricsVerbs:
    """The verb of a bus that tells Prometheus how it is."""

    database: Database

    def metrics(self) -> Metrics:
        """What waits where, who works, and what was counted so far: `str()` of it is text for Prometheus.

        Whoever serves it, the numbers are those of the whole database, so one scrape is enough. A worker has metrics
        of its own: `worker.metrics()`.
        """
        return self.database.in_transaction(database.read())
