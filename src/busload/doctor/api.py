"""`bus.doctor()`: what is wrong, why it matters, and what to do about it."""

from __future__ import annotations

import secrets
import shutil
from datetime import timedelta
from pathlib import Path

import psycopg

from busload.commands.checks import seconds_of
from busload.dispatch.publish import Publisher
from busload.doctor.broker import ask_broker
from busload.doctor.catalog import finding
from busload.doctor.facts import Disk, Facts, read
from busload.doctor.finding import CHECKS, Diagnosis, Finding, FindingCode, Skipped
from busload.doctor.findings import examine
from busload.doctor.findings_of_work import judge_health
from busload.health.api import HealthVerbs
from busload.health.health import HealthCode
from busload.postgres import waiting
from busload.postgres.connection import AsyncConnection, is_full, is_refused
from busload.postgres.dsn import place
from busload.postgres.own_connection import connect_async
from busload.postgres.plan import perform_async

CHANNEL = "busload_doctor"
RESPONSE_WITHIN = 5.0
"""Seconds in which the server has to answer each of our few statements."""
OF_OUR_TABLES = ("privileges", "workers", "work", "retention")


class DoctorVerbs(HealthVerbs):
    """The verb of a bus that looks for faults, and names their cures."""

    _publisher: Publisher | None

    async def doctor(self, *, timeout: timedelta | float = 30) -> Diagnosis:
        """Look for faults of the server, the schema, the workers, the work and the broker.

        It does not raise because something is wrong, and writes nothing: what cannot be seen is among `skipped`.
        `timeout` is how long it may take, in seconds if it is a number; it usually takes a tenth of one.
        `settings.doctor` says from when on something is a fault.
        """
        seconds = seconds_of(timeout)
        try:
            async with waiting.TimeLimit(seconds):
                async with await connect_async(self.database.dsn, response_timeout=RESPONSE_WITHIN) as conn:
                    facts = await self._facts_of(conn)
                    found = list(examine(facts, self.settings.doctor))
                    skipped = [*facts.skipped, *_unseen(facts)]
                if facts.migrations is not None:
                    found += judge_health(await self.health(timeout=RESPONSE_WITHIN))
                checked = list(CHECKS)
                if self._publisher is None:
                    checked.remove("broker")
                else:
                    prefix = self.settings.queue_prefix
                    answer = await ask_broker(self._publisher, prefix, RESPONSE_WITHIN)
                    found += [answer] if isinstance(answer, Finding) else []
                    skipped += [answer] if isinstance(answer, Skipped) else []
        except (psycopg.Error, TimeoutError) as error:  # DatabaseUnavailableError is one
            return _unreachable(error, self.database.dsn, seconds)
        return Diagnosis.of(found, checked, skipped)

    async def _facts_of(self, conn: AsyncConnection) -> Facts:
        async with conn.transaction():
            facts = await perform_async(conn, read(self.settings.doctor))
        facts.pooled = facts.server is not None and facts.server.backend_pid != conn.info.backend_pid
        facts.disk = _disk(conn.info.host, facts)
        try:
            facts.heard = await self._hears(conn)
        except psycopg.Error as error:
            facts.skipped.append(Skipped("notifications", " ".join(str(error).split())))
        return facts

    async def _hears(self, conn: AsyncConnection) -> bool:
        """Whether a notification of one session reaches another: a pooler may be in its way."""
        token = secrets.token_hex(8)
        await conn.execute(f"LISTEN {CHANNEL}")
        async with await connect_async(self.database.dsn, response_timeout=RESPONSE_WITHIN) as other:
            await other.execute("SELECT pg_catalog.pg_notify(%s::text, %s::text)", [CHANNEL, token])
        heard = False
        async for notification in conn.notifies(timeout=self.settings.doctor.notify_within.total_seconds()):
            if notification.payload == token:
                heard = True
                break
        await conn.execute(f"UNLISTEN {CHANNEL}")
        return heard


def _unseen(facts: Facts) -> list[Skipped]:
    """What could not be checked because something else is missing."""
    skipped = list[Skipped]()
    if facts.disk is None:
        skipped.append(Skipped("disk", "The disk of the server cannot be seen from here."))
    if facts.objects is not None and not facts.has_schema:
        skipped += [Skipped(check, "There is no schema busload.") for check in OF_OUR_TABLES]
    elif facts.migrations is None and not any(one.check == "workers" for one in facts.skipped):
        skipped.append(Skipped("workers", "Our tables cannot be read."))
    return skipped


def _disk(host: str, facts: Facts) -> Disk | None:
    """The disk of the data, if the server is on this machine and its folder can be seen."""
    folder = (facts.settings or {}).get("data_directory")
    if folder is None or not host.startswith("/"):
        return None
    try:
        usage = shutil.disk_usage(Path(folder.value))
    except OSError:
        return None
    return Disk(folder.value, usage.free, usage.total)


def _unreachable(error: Exception, dsn: str, seconds: float | None) -> Diagnosis:
    """Nothing else can be known."""
    said = " ".join(str(error).split()) or f"no answer within {seconds:g} s"
    if is_full(error):
        one = finding(FindingCode.DATABASE_FULL, f"PostgreSQL has no connection left for {place(dsn)}: {said}")
    elif is_refused(error):
        one = finding(HealthCode.DATABASE_UNUSABLE, f"PostgreSQL does not let us into {place(dsn)}: {said}")
    else:
        one = finding(HealthCode.DATABASE_UNREACHABLE, f"{place(dsn)} cannot be reached: {said}")
    others = [check for check in CHECKS if check != one.check]
    return Diagnosis.of([one], [one.check], [Skipped(check, "The database cannot be asked.") for check in others])
