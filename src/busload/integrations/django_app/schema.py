"""Our schema in the database of a Django project: by `manage.py migrate`, in Django's own transaction."""

from __future__ import annotations

import sys
from typing import Any

from django.conf import settings
from django.db import connections, transaction
from django.db.migrations.operations.base import Operation

from busload.integrations.django_app.conf import configuration
from busload.postgres import schema as busload_schema
from busload.postgres.schema import migrate


class ApplySchema(Operation):
    """Apply what the database lacks of busload's schema. If `busload schema migrate` came first, nothing is done.

    Backwards it does nothing: it would delete all commands. To do that, run DROP SCHEMA busload CASCADE.
    """

    reduces_to_sql = True
    reversible = True

    def state_forwards(self, app_label: str, state: Any) -> None:
        pass

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if schema_editor.connection.alias == configuration().database:
            schema_editor.execute(busload_schema.sql(), params=None)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        pass

    def describe(self) -> str:
        return "Apply the schema of busload"


def upgrade(*, using: str, verbosity: int = 1, **_: Any) -> None:
    """Bring the schema up to this release after each `manage.py migrate`: a release needs no migration of Django's.

    A database without our schema is left alone, unless the project has switched the migrations of this app off.
    """
    if using != configuration().database:
        return
    found = missing(using)
    by_migrations = getattr(settings, "MIGRATION_MODULES", {}).get("busload", "on") is not None
    if not found or (by_migrations and len(found) == len(migrate.MIGRATIONS)):
        return
    with transaction.atomic(using=using), connections[using].cursor() as cursor:
        cursor.execute(busload_schema.sql())
    if verbosity > 0:
        names = ", ".join(f"{one.version:04}_{one.name}" for one in found)
        sys.stdout.write(f"  Applied to the schema of busload: {names}\n")


def missing(alias: str) -> list[migrate.Migration]:
    """The files of this release that the database lacks."""
    with connections[alias].cursor() as cursor:
        cursor.execute(migrate.EXISTS.decode())
        if not cursor.fetchone()[0]:
            return list(migrate.MIGRATIONS)
        cursor.execute(migrate.APPLIED.decode())
        applied = {version for version, *_ in cursor.fetchall()}
    return [one for one in migrate.MIGRATIONS if one.version not in applied]
