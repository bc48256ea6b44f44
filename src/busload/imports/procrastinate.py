"""Jobs of procrastinate that wait in the status `todo`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from busload.commands.command import BatchCommand
from busload.imports.job_table import JobStatements, JobTable, beyond_reach
from busload.imports.take_over import WaitingTask, command_id_of
from busload.postgres.statements import statements

SQL = statements(__name__)


class Procrastinate(JobTable):
    """The jobs of procrastinate in a database. If `joins`, commands are sent in the transaction that removes the jobs.

    The argument names become the keys of `data`. A `queueing_lock` becomes the task key. A `lock` is kept as the header
    `procrastinate-lock`: for a concurrency limit, put it into the data, or read the header in the handler.
    """

    name = "procrastinate"
    statements = JobStatements(SQL.has_jobs, SQL.waiting, SQL.lock_waiting, SQL.cancel)
    not_found = (
        "There is no table procrastinate_jobs in this database, where its search_path looks. Name that of procrastinate"
        " by --source; for a table in another schema, add options=-csearch_path%3DSCHEMA to its DSN."
    )

    def __init__(self, dsn: str, *, joins: bool, queues: Sequence[str] = ()) -> None:
        super().__init__(dsn, joins=joins, names=queues)

    def task(self, *row: Any) -> WaitingTask:
        id, deferred, queue, name, priority, lock, queueing_lock, args, scheduled_at, beyond = row
        if beyond is not None:
            return WaitingTask(str(id), str(queue), str(name), None, beyond_reach(beyond), id)
        command = BatchCommand(
            str(name),
            command_id_of(self.name, f"{id}:{deferred}"),  # another database has a job of the same number
            args,
            task_key=None if queueing_lock is None else str(queueing_lock),
            priority=max(-32768, min(32767, priority)),
            run_at=scheduled_at,
            headers=None if lock is None else {"procrastinate-lock": str(lock)},
        )
        return WaitingTask(str(id), str(queue), str(name), command, handle=id)
