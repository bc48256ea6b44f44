"""`bus.limits` and `bus.domains`: what holds commands up on purpose, and how to let them go on."""

from __future__ import annotations

import builtins
import logging

from busload.commands.checks import check, given
from busload.limits import concurrency, pause, rate
from busload.limits.concurrency import ConcurrencyStatus
from busload.limits.pause import DomainOverview, Pause
from busload.limits.rate import LimitStatus
from busload.postgres.callers_connection import AnyConnection
from busload.postgres.database import Database
from busload.postgres.write import Write
from busload.settings import InputLimits

log = logging.getLogger("busload")


class Limits:
    """Limits of handlers, as all workers together use them."""

    def __init__(self, database: Database, limits: InputLimits) -> None:
        self._database, self._limits = database, limits

    async def list(self, name: str | None = None, *, limit: int = 100) -> builtins.list[LimitStatus]:
        """The rate limits that were used within a day, at most `limit` of them: the rate now, and what was refused.

        With `name` only the limits of that name, one for each value of their `by`.
        """
        check(self._limits, writes=False, **given(limit_name=name), limit=limit)
        return await self._database.read(rate.limits(name, limit=limit))

    async def reset(self, name: str, by: str | None = None, *, operator: str | None = None) -> int:
        """Let calls under the limit `name` go again at once, and return how many limits were reset.

        The limit waits because its receiver has refused calls. Reset it when the receiver takes calls again. If the
        limit has a function `by`, each value of that function has a limit of its own. `by` names one value, as text.
        Without `by`, the limits of all values are reset. `operator` names who does it.
        """
        check(self._limits, limit_name=name, **given(by=by or None), operator=operator)
        return await self._database.write(Write(rate.reset(name, by, operator=operator)))

    async def concurrency(self, name: str | None = None, *, limit: int = 100) -> builtins.list[ConcurrencyStatus]:
        """The concurrency limits that have calls running or commands waiting, at most `limit` of them.

        Each says how many calls run now, on which workers, and how many commands wait. With `name` only the limits of
        that name, one for each value of their `by`.
        """
        check(self._limits, writes=False, **given(limit_name=name), limit=limit)
        return await self._database.read(concurrency.concurrency(name, limit=limit))


class Domains:
    """Domains that rest: nothing new starts in a paused `domain` until somebody resumes it."""

    def __init__(self, database: Database, limits: InputLimits) -> None:
        self._database, self._limits = database, limits

    async def pause(
        self,
        domain: str,
        *,
        reason: str | None = None,
        operator: str | None = None,
        conn: AnyConnection | None = None,
    ) -> bool:
        """Let nothing new start in a domain; returns False if it was paused already.

        What runs finishes, and what is sent waits. Workers hear of it at once, or within `sweep_every` if the
        notification is lost. Until then a worker may claim once more; once it has heard, it starts nothing, and what it
        holds but has not begun goes back. `reason`, and `operator`, who pauses it, are for people to read. With `conn`
        the domain is paused when that transaction commits.
        """
        check(self._limits, domain=domain, operator=operator, **given(reason=reason))
        write = Write(pause.pause(domain, reason=reason, operator=operator), one_statement=True)
        paused = await self._database.write(write, conn)
        _log("Paused", paused, domain, operator)
        return paused

    async def resume(self, domain: str, *, operator: str | None = None, conn: AnyConnection | None = None) -> bool:
        """Let a paused domain go on; returns False if it was not paused.

        `operator` names who resumes it. With `conn` the domain goes on when that transaction commits.
        """
        check(self._limits, domain=domain, operator=operator)
        write = Write(pause.resume(domain, operator=operator), one_statement=True)
        resumed = await self._database.write(write, conn)
        _log("Resumed", resumed, domain, operator)
        return resumed

    async def list(self) -> builtins.list[DomainOverview]:
        """Every domain that has something waiting or running, is served or is paused, with how much of each."""
        return await self._database.read(pause.domains())

    async def pauses(self) -> builtins.list[Pause]:
        """Every domain that is paused: since when, by whom and why."""
        return await self._database.read(pause.pauses())

    async def history(self, domain: str | None = None, *, limit: int = 100) -> builtins.list[Pause]:
        """The pauses of a domain or of all, at most `limit` and newest first, also those that are over.

        Each says who paused the domain and who resumed it.
        """
        check(self._limits, writes=False, **given(domain=domain), limit=limit)
        return await self._database.read(pause.history(domain, limit=limit))


def _log(what: str, done: bool, domain: str, operator: str | None) -> None:
    if done:
        log.info("%s domain %s%s", what, domain, f", by {operator}" if operator else "")
