"""What operators do about commands that wait to be published: `bus.outbox`."""

from __future__ import annotations

import builtins
import logging
from uuid import UUID

import psycopg

from busload.commands import search
from busload.commands.checks import check, given
from busload.commands.wording import counted
from busload.dispatch import creation_state
from busload.dispatch import outbox as store
from busload.dispatch.outbox import OutboxEntry
from busload.dispatch.publish import Publisher
from busload.dispatch.reconcile import Reconciler, Reconciliation
from busload.dispatch.report import PublishingReport, report
from busload.errors import BusloadError, InvalidOperationError, PartlyDoneError
from busload.postgres.database import Database
from busload.postgres.write import Write
from busload.settings import InputLimits

log = logging.getLogger("busload")


class Outbox:
    """Commands that a broker has not confirmed a message about: `bus.outbox`.

    `domain` and `batch_id` narrow a call to the commands of a domain or a batch. With `dry_run` nothing is written.
    """

    def __init__(self, database: Database, limits: InputLimits, publisher: Publisher | None) -> None:
        self._database, self._limits, self._publisher = database, limits, publisher

    async def list(self, *, domain: str | None = None, batch_id: UUID | None = None) -> list[OutboxEntry]:
        """What waits, by transport, domain and why."""
        self._check(domain, batch_id, writes=False)
        return await self._database.read(store.waiting(domain=domain, batch_id=batch_id))

    async def report(self, *, days: int = 14) -> PublishingReport:
        """How publishing goes: what needs another round by job, the last `days`, and the last hour by job.

        It tells of batches. At most 100 jobs are told of, those first that have most to publish.
        """
        check(self._limits, writes=False, limit=days)
        return await self._database.read(report(days=days))

    async def retry(
        self,
        *,
        domain: str | None = None,
        batch_id: UUID | None = None,
        operator: str | None = None,
        dry_run: bool = False,
    ) -> int:
        """Let relays try again now what waits for another round; returns how many commands that are.

        `operator` names who does it.
        """
        self._check(domain, batch_id, writes=not dry_run, operator=operator)
        if dry_run:
            return await self._database.read(store.retryable(domain=domain, batch_id=batch_id))
        plan = store.retry(domain=domain, batch_id=batch_id, operator=operator)
        return await self._database.write(Write(plan, batch_id, one_statement=True))

    async def reroute(
        self,
        *,
        domain: str | None = None,
        batch_id: UUID | None = None,
        failed_only: bool = True,
        operator: str | None = None,
        dry_run: bool = False,
    ) -> int:
        """Let PostgreSQL deliver what waits after a failed round; returns how many commands that are.

        Without `failed_only` it delivers all that waits. The audit trail of each command has it as REROUTED, with the
        name of the `operator`.
        """
        if dry_run:
            entries = await self.list(domain=domain, batch_id=batch_id)
            return sum(entry.commands for entry in entries if entry.rounds or not failed_only)
        self._check(domain, batch_id, operator=operator, failed_only=failed_only)
        rerouted, moved = 0, 1
        try:
            while moved:
                plan = store.reroute(domain=domain, batch_id=batch_id, failed=failed_only, operator=operator)
                moved = await self._database.write(Write(plan, batch_id, one_statement=True, goes_on=bool(rerouted)))
                rerouted += moved
            await self._database.write(Write(creation_state.close(), one_statement=True, goes_on=bool(rerouted)))
        except (BusloadError, psycopg.Error) as error:
            if not rerouted:
                raise
            done = f"{counted(rerouted, 'command is', 'commands are')} rerouted to PostgreSQL so far"
            raise PartlyDoneError(done, rerouted, error, todo="Repeat the call to reroute the rest.") from error
        if rerouted:
            by = f", by {operator}" if operator else ""
            log.info("Rerouted %s to PostgreSQL%s", counted(rerouted, "command"), by)
        return rerouted

    async def reconcile(
        self, *, domain: str | None = None, repair: bool = False, operator: str | None = None
    ) -> builtins.list[Reconciliation]:
        """Compare the commands that the database has published with the messages that the broker holds.

        With `repair`, missing messages are published again, and messages about loads in which no command waits are
        removed; `operator` names who does that. Without a `domain`, all domains are compared.

        Commands are counted load by load: commands are missing if more of them wait than the messages about their load
        name. A repair takes messages out of the queue for some seconds and puts back those that are still needed. So a
        repair also works with a broker that cannot show its messages. A message that a worker holds at this moment may
        be overlooked. Its commands then count as missing, and publishing them once more does no harm.
        """
        self._check(domain, writes=repair, operator=operator)
        if self._publisher is None:
            raise InvalidOperationError("The bus has no transport. Give it one: CommandBus(dsn, transport=URL).")
        reconciler = Reconciler(self._publisher, self._database.read, self._database.write)
        domains = [domain] if domain is not None else await self._database.read(search.domains())
        if repair and operator is not None:
            await self._database.write(Write(store.note_repair(domain, operator=operator), one_statement=True))
        return [await reconciler.compare(each, repair=repair) for each in domains]

    def _check(
        self, domain: str | None, batch_id: UUID | None = None, *, writes: bool = True, **others: object
    ) -> None:
        check(self._limits, writes=writes, **given(domain=domain, batch_id=batch_id), **others)
