"""The worker inside a web process of Django, for development: BUSLOAD = {..., "WORKER": True}."""

from __future__ import annotations

from functools import cache

from busload.integrations.django_app.conf import load_bus
from busload.integrations.worker_thread import WorkerThread
from busload.worker import Worker


@cache
def worker_thread() -> WorkerThread:
    return WorkerThread(Worker(load_bus()))
