"""Tasks as they stand here and in the table of another tracker, for whoever moves from that one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from psycopg import sql

from busload.postgres.plan import Plan, many
from busload.postgres.statements import statements

SQL = statements(__name__)


@dataclass(frozen=True, slots=True)
class Newest:
    """How a task stands: its state, and the ids that its newest execution may go by."""

    task_id: str
    status: str
    announced: UUID
    execution_id: UUID | None

    @property
    def ids(self) -> set[str]:
        return {str(id) for id in (self.announced, self.execution_id) if id is not None}

    @property
    def shown_id(self) -> str:
        return str(self.execution_id or self.announced)


@dataclass(frozen=True, slots=True)
class OldTask:
    """The newest row of a task in the table of another tracker."""

    task_id: str
    status: str | None
    execution_id: str | None


def task_page(*, after: str, queues: Sequence[str] | None, limit: int) -> Plan[list[str]]:
    return many(str, SQL.task_page, after=after, domains=_listed(queues), limit=limit)


def newest(task_ids: Sequence[str], *, queues: Sequence[str] | None) -> Plan[list[Newest]]:
    return many(Newest, SQL.newest, task_keys=list(task_ids), domains=_listed(queues))


def _listed(queues: Sequence[str] | None) -> list[str] | None:
    return None if queues is None else list(queues)


class OldTable:
    """The table of another tracker: one row per execution, the newest of each task counts."""

    def __init__(self, table: str, columns: dict[str, str], queues: Sequence[str] | None) -> None:
        name = {key: _identifier(column) for key, column in columns.items()}
        where = sql.SQL("{}::text = ANY (%(queues)s::text[])").format(name["queue"]) if queues else sql.SQL("true")
        self._queues = list(queues or ())
        self._select = sql.SQL(
            "SELECT DISTINCT ON ({task_id}::text) {task_id}::text, {status}::text, {execution_id}::text FROM {table}"
            " WHERE {condition} AND {where} ORDER BY {task_id}::text, {created_at} DESC"
        ).format
        self._names = name | {"table": _identifier(*table.split(".")), "where": where}

    def page(self, *, after: str, limit: int) -> Plan[list[OldTask]]:
        return self._read("{task_id}::text > %(after)s::text", " LIMIT %(limit)s::integer", after=after, limit=limit)

    def of(self, task_ids: Sequence[str]) -> Plan[list[OldTask]]:
        return self._read("{task_id}::text = ANY (%(task_ids)s::text[])", "", task_ids=list(task_ids))

    def _read(self, condition: str, end: str, **params: Any) -> Plan[list[OldTask]]:
        narrowed = sql.SQL(condition).format(**self._names)
        statement = self._select(**self._names, condition=narrowed) + sql.SQL(end)
        return many(OldTask, statement.as_bytes(None), **params, queues=self._queues)


def _identifier(*parts: str) -> sql.Identifier:
    """A name within a statement that has parameters."""
    return sql.Identifier(*(part.replace("%", "%%") for part in parts))
