"""Jobs of PgQueuer that wait in the status `queued`."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from busload.commands.command import BatchCommand
from busload.commands.payload import PayloadRefusedError, decode_strict
from busload.imports.job_table import JobStatements, JobTable, beyond_reach
from busload.imports.take_over import WaitingTask, command_id_of
from busload.postgres.statements import statements

SQL = statements(__name__)


class PgQueuer(JobTable):
    """The jobs of PgQueuer in a database. If `joins`, commands are sent in the transaction that removes the jobs.

    A payload is bytes of any kind. What is JSON becomes `data`; other payloads stay, or become `{"base64": …}` if
    `in_base64`. A `dedupe_key` becomes the task key. Headers that are texts are kept.
    """

    name = "pgqueuer"
    statements = JobStatements(SQL.has_jobs, SQL.waiting, SQL.lock_waiting, SQL.cancel)
    not_found = (
        "There is no table pgqueuer in this database, where its search_path looks. Name that of PgQueuer as the"
        " argument DSN; for a table in another schema, add options=-csearch_path%3DSCHEMA to it."
    )

    def __init__(self, dsn: str, *, joins: bool, entrypoints: Sequence[str] = (), in_base64: bool = False) -> None:
        super().__init__(dsn, joins=joins, names=entrypoints)
        self._in_base64 = in_base64

    def task(
        self,
        id: int,
        created: str,
        entrypoint: str,
        priority: int,
        dedupe_key: str | None,
        payload: bytes | None,
        headers: Mapping[str, object] | None,
        run_at: datetime | None,
        beyond: str | None,
    ) -> WaitingTask:
        if beyond is not None:
            return WaitingTask(str(id), self.name, entrypoint, None, beyond_reach(beyond), id)
        try:
            data = self._data(payload)
        except PayloadRefusedError as refused:
            return WaitingTask(str(id), self.name, entrypoint, None, _why_not(refused), id)
        command = BatchCommand(
            entrypoint,
            command_id_of(self.name, f"{id}:{created}"),  # another database has a job of the same number
            data,
            task_key=dedupe_key,
            priority=max(-32768, min(32767, priority)),
            run_at=run_at,
            headers={name: value for name, value in (headers or {}).items() if isinstance(value, str)} or None,
        )
        return WaitingTask(str(id), self.name, entrypoint, command, handle=id)

    def _data(self, payload: bytes | None) -> Any:
        if payload is None:
            return None
        try:
            return decode_strict(payload)
        except PayloadRefusedError:
            if not self._in_base64:
                raise
            return {"base64": base64.b64encode(payload).decode()}


def _why_not(refused: PayloadRefusedError) -> str:
    if refused.problem.code == "TOO_LARGE":  # and larger still in base64
        return f"Its payload is refused: {refused}."
    return f"Its payload is not JSON that busload takes: {refused}. --base64 imports it as text."
