"""What `manage.py check` says about busload."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from django.core.checks import CheckMessage, Error, Warning
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections

from busload.integrations.django_app.bus import dsn_of
from busload.integrations.django_app.conf import configuration, load_bus
from busload.integrations.django_app.schema import missing
from busload.postgres.schema.migrate import MIGRATIONS


def check_settings(**_: Any) -> list[CheckMessage]:
    """The setting BUSLOAD, the database that it names, and the bus."""
    try:
        found = configuration()
    except ImproperlyConfigured as error:
        return [_error(error, "E001")]
    try:
        dsn_of(found.database)
    except ImproperlyConfigured as error:
        return [_error(error, "E002")]
    try:
        bus = load_bus()
    except ImproperlyConfigured as error:
        return [_error(error, "E003")]
    if not bus.handlers.domains:
        return [
            Warning(
                f"The bus {found.bus} has no handlers, so no worker can run.",
                hint="Let BUSLOAD['BUS'] name a module that imports them all, such as shop.handlers:bus.",
                id="busload.W001",
            )
        ]
    return []


def check_schema(*, databases: Sequence[str] | None = None, **_: Any) -> list[CheckMessage]:
    """Our schema, where Django looks at databases: `manage.py check --database default`."""
    try:
        alias = configuration().database
        if alias not in (databases or ()) or connections[alias].vendor != "postgresql":
            return []
        lacking = missing(alias)
    except (ImproperlyConfigured, DatabaseError):
        return []  # the other check says so, or Django does
    if not lacking or _is_migrating():
        return []
    if len(lacking) == len(MIGRATIONS):
        found = f"The database {alias!r} has no schema of busload."
    else:
        names = ", ".join(f"{one.version:04}_{one.name}" for one in lacking)
        found = f"The schema of busload in the database {alias!r} is older than this release: it lacks {names}."
    return [Warning(found, hint="Run `manage.py migrate`.", id="busload.W002")]


def _is_migrating() -> bool:
    """Whether this is `manage.py migrate`, which looks at the database right before it mends this."""
    return sys.argv[1:2] == ["migrate"]


def _error(error: ImproperlyConfigured, number: str) -> Error:
    """The message of a setting that cannot be: what was found, and what to write instead."""
    return Error(str(error), id=f"busload.{number}")
