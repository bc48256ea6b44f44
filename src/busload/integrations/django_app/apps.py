"""The app `busload` of a Django project."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from django.apps import AppConfig
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import request_started
from django.db.models.signals import post_migrate


class BusloadConfig(AppConfig):
    name = "busload.integrations.django_app"
    label = "busload"
    verbose_name = "busload"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from busload.integrations.django_app import conf, schema, system_checks

        checks.register(system_checks.check_settings)
        checks.register(system_checks.check_schema, checks.Tags.database)
        post_migrate.connect(schema.upgrade, sender=self)
        with suppress(ImproperlyConfigured):  # the check says what is wrong
            conf.load_bus()  # as the admin imports its modules: whoever sends knows which data handlers take
            if conf.configuration().worker:
                request_started.connect(_start_worker, dispatch_uid="busload.worker")


def _start_worker(**_: Any) -> None:
    """Start the worker with the first request: then this is a process that serves, and it will not fork."""
    from busload.integrations.django_app.inside import worker_thread

    worker_thread().start_once()
