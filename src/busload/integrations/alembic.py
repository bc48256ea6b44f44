"""Alembic: operations that install and upgrade our schema in a revision, and autogenerate that leaves it alone.

    # env.py
    from busload.integrations.alembic import include_name

    context.configure(..., include_schemas=True, include_name=include_name)

    # a revision
    def upgrade() -> None:
        op.busload_upgrade()

Once env.py imports this module, `alembic revision --autogenerate` writes `op.busload_upgrade()` by itself whenever the
database lacks something of the schema.
"""

from __future__ import annotations

from typing import Any, Literal

from alembic.autogenerate import comparators, renderers
from alembic.autogenerate.api import AutogenContext
from alembic.operations import MigrateOperation, Operations
from alembic.operations.ops import UpgradeOps
from sqlalchemy import text
from sqlalchemy.engine import Connection

from busload.postgres import schema
from busload.postgres.schema import migrate

__all__ = ["BusloadUpgrade", "include_name"]

SCHEMA = "busload"


def include_name(name: str | None, type_: str, parent_names: Any) -> bool:
    """For `context.configure(include_name=...)`: leave our schema alone.

    Without it, an autogenerate that compares all schemas would drop tables of ours, since your models lack them.
    If you have a function of your own, let it return `include_name(name, type_, parent_names) and ...`.
    """
    return not (type_ == "schema" and name == SCHEMA)


@Operations.register_operation("busload_upgrade")
class BusloadUpgrade(MigrateOperation):
    """Apply what the database lacks of our schema: all of it to an empty database, and nothing if it is up to date.

    `op.busload_upgrade()` in a revision does this, in the transaction of the revision, also offline with `--sql`. For
    mypy, which does not know operations of others: `op.invoke(BusloadUpgrade())`.
    """

    @classmethod
    def busload_upgrade(cls, operations: Operations) -> None:
        operations.invoke(cls())

    def reverse(self) -> MigrateOperation:
        return _BusloadStays()

    def to_diff_tuple(self) -> tuple[Literal["busload_upgrade"]]:
        return ("busload_upgrade",)


class _BusloadStays(MigrateOperation):
    """The way back from an upgrade: our schema only goes forward, and an older release works on it."""

    def reverse(self) -> MigrateOperation:
        return BusloadUpgrade()


@Operations.implementation_for(BusloadUpgrade)
def _upgrade(operations: Operations, _: BusloadUpgrade) -> None:
    operations.execute(schema.sql().rstrip().removesuffix(";"))  # Alembic ends what it prints by itself


@comparators.dispatch_for("schema")
def _compare(context: AutogenContext, upgrade_ops: UpgradeOps, _: Any) -> None:
    """Have a revision that is generated upgrade our schema, if the database lacks something of it."""
    if (
        context.connection is not None
        and context.connection.dialect.name == "postgresql"
        and _lacks(context.connection)
    ):
        upgrade_ops.ops.append(BusloadUpgrade())


def _lacks(connection: Connection) -> bool:
    if not connection.execute(text(migrate.EXISTS.decode().replace("::name", ""))).scalar_one():
        return True
    found = connection.execute(text(f"SELECT max(version) FROM {SCHEMA}.migration")).scalar_one()  # noqa: S608
    return bool((found or 0) < schema.version())


@renderers.dispatch_for(BusloadUpgrade)
def _render(context: AutogenContext, _: BusloadUpgrade) -> str:
    context.imports.add(f"import {__name__}  # op.busload_upgrade()")
    return "op.busload_upgrade()"


@renderers.dispatch_for(_BusloadStays)
def _render_stays(context: AutogenContext, _: _BusloadStays) -> str:
    return "pass  # the schema of busload only goes forward"
