"""A bus on which everything has happened that the pages of the dashboard can show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from busload import BatchCommand, CommandBus, HandlerContext, PermanentCommandError
from busload.buffers.buffer import Buffer
from busload.commands import rescue
from busload.commands.command import Command
from busload.commands.send import NO_BROKER
from busload.jobs.job import Stage
from busload.schedules.fire import fire
from tests.given import DOMAIN, Database, Given

RATE_LIMIT = """
INSERT INTO busload.rate_limit (name, subject, adaptive, rate, ceiling, blocked_until, calls, refused)
VALUES (%s, %s, true, 12.5, 20, now() + interval '1 hour', 1234, 7)
"""


@dataclass(frozen=True, slots=True)
class Story:
    """What was made, and every page that shows some of it."""

    batch_id: UUID
    job_id: UUID
    worker: int
    buffer: str

    @property
    def paths(self) -> list[str]:
        about = [f"/jobs/{self.job_id}", f"/workers/{self.worker}", f"/buffers/{self.buffer}"]
        lists = ["/jobs", "/domains", "/limits", "/buffers", "/dispatch", "/workers", "/retention", "/audit"]
        return [*lists, *about, "/schedules", "/schedules/nightly"]


async def _refuse(command: Command, ctx: HandlerContext) -> None:
    raise PermanentCommandError("account closed", code="CLOSED")


async def failed_job(given: Given, bus: CommandBus, name: str = "monthly report") -> UUID:
    """A job whose second stage has failed, and whose first one is undone now."""
    given.handler("Load")
    given.handler("Refuse", _refuse)
    stages = [
        Stage("load", [BatchCommand("Load")] * 2, compensate=BatchCommand("Undo", max_attempts=1)),
        Stage("check", [BatchCommand("Refuse")], compensate=BatchCommand("Undo")),
        Stage("send", [BatchCommand("Load")]),
    ]
    job_id = await bus.jobs.create(DOMAIN, stages, name=name, custom_data={"month": name})
    await given.drained()
    for item in await bus.troubleshooting.list(DOMAIN, command_type="Refuse"):
        await bus.troubleshooting.cancel(DOMAIN, item.command_id, reason=name, operator="ada")
    await given.drained()
    return job_id


def unpublished(database: Database, domain: str = DOMAIN, error: str = "the broker is full") -> None:
    """What is ready in a domain waits in the outbox instead, after two failed rounds."""
    database.rows(
        "INSERT INTO busload.outbox (lo, hi, domain, batch_id, transport, rounds, reason, error, failed_at) "
        "SELECT lo, hi, domain, batch_id, 'redis', 2, 'REFUSED', %s, now() FROM busload.queue WHERE domain = %s",
        error,
        domain,
    )
    database.rows("DELETE FROM busload.queue WHERE domain = %s", domain)


async def parked_group(given: Given, bus: CommandBus, name: str, events: Sequence[str]) -> Buffer:
    """A buffer with a group in troubleshooting, and events that wait."""
    buffer = bus.buffer(name, size=len(events), max_age=timedelta(hours=1))
    buffer.handler()(_refuse)
    for text in events:
        await buffer.add({"text": text})
    await given.drained(domains=[name])
    for text in events[:-1]:
        await buffer.add({"text": text})
    return buffer


async def nightly(bus: CommandBus, database: Database) -> None:
    """A schedule that was fired late and triggered, and is paused; and one whose due times were missed."""
    what = BatchCommand("Push", data={"month": "n"})
    bus.schedule("nightly", cron="0 2 * * *", timezone="Europe/Paris", command=what, domain="reports")
    bus.schedule("hourly", every=timedelta(hours=1), command=BatchCommand("Push"), domain="reports", catch_up="skip")
    await bus.schedules.sync()
    database.rows("UPDATE busload.schedule SET next_due_at = now() - interval '40 seconds'")
    database.perform(fire(NO_BROKER))
    await bus.schedules.trigger("nightly", operator="eve")
    await bus.schedules.pause("nightly", reason="year-end closing", operator="eve")


async def everything(given: Given, bus: CommandBus) -> Story:
    database = given.database
    job_id = await failed_job(given, bus)
    await parked_group(given, bus, "contact_events", ["a", "b", "c"])
    await bus.create_batch("crm", [BatchCommand("Push", data={"n": n}) for n in range(3)], name="contacts")
    await nightly(bus, database)
    unpublished(database, "crm")
    batch_id = await given.batch(5, name="January")
    worker = given.registered_worker()
    [held] = given.claimed(1, by=worker)
    about = '{"failures_in_row": 50}'
    database.rows("UPDATE busload.worker SET condition = %s, version = '9.8.7' WHERE worker = %s", about, worker)
    database.rows(RATE_LIMIT, "crm", "tenant 1")
    database.rows("INSERT INTO busload.concurrency_limit (name, most) VALUES ('bank', 3)")
    database.rows(
        "INSERT INTO busload.permit (limit_name, limit_subject, worker, command) VALUES ('bank', 'x', %s, %s)",
        worker,
        held.id,
    )
    await bus.domains.pause("crm", reason="the crm is down", operator="ada")
    await bus.domains.resume("crm", operator="ada")
    await bus.domains.pause("crm", reason="down again", operator="ada")
    await bus.hold_batch(DOMAIN, batch_id, reason="the bank complains", operator="eve")
    silent = rescue.register(name="silent", domains=["crm"], concurrency=4, lease_for=timedelta(seconds=30))
    gone = database.perform(silent)
    database.rows("UPDATE busload.worker SET seen_at = now() - interval '1 hour' WHERE worker = %s", gone)
    await bus.prune(timedelta(days=30))
    return Story(batch_id, job_id, worker, "contact_events")
