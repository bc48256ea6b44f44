"""What operators do about commands that wait to be announced: look, try again, go without the broker, compare."""

from __future__ import annotations

import builtins
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import UUID

from busload.domain import message
from busload.domain.dispatch import OutboxEntry, Reconciliation
from busload.domain.message import UnreadableMessage
from busload.errors import InvalidOperationError
from busload.requests import Write
from busload.store import outbox as store
from busload.store.outbox import Seen
from busload.store.send import Range

if TYPE_CHECKING:
    from busload.bus import CommandBus, SyncCommandBus

log = logging.getLogger("busload")

SETTLED = timedelta(seconds=5)
"""What was announced later than that is not missed yet."""

MOST_LOOKED_AT = 10_000
"""Messages, and loads, that one comparison looks at."""


class Outbox:
    """Commands that a broker has not confirmed a message about."""

    def __init__(self, bus: CommandBus) -> None:
        self._bus = bus

    async def list(self, *, domain: str | None = None, batch_id: UUID | None = None) -> list[OutboxEntry]:
        """What waits, by transport, domain and why."""
        return await self._bus._read(self._bus._requests.outbox(domain, batch_id))

    async def retry(self, *, domain: str | None = None, batch_id: UUID | None = None, dry_run: bool = False) -> int:
        """Let relays try again now what waits for another round; returns how many commands that are."""
        if dry_run:
            return _failed(await self.list(domain=domain, batch_id=batch_id))
        return await self._bus._write(self._bus._requests.retry_outbox(domain, batch_id))

    async def reroute(
        self,
        *,
        domain: str | None = None,
        batch_id: UUID | None = None,
        failed_only: bool = True,
        operator: str | None = None,
        dry_run: bool = False,
    ) -> int:
        """Let PostgreSQL deliver what waits after a failed round, or all of it; returns how many commands that are.

        The audit trail of each has it as REROUTED, with the operator's name.
        """
        if dry_run:
            return _reroutable(await self.list(domain=domain, batch_id=batch_id), failed_only)
        rerouted = 0
        for write in self._bus._requests.reroute(domain, batch_id, failed_only=failed_only, operator=operator):
            moved, loads = await self._bus._write(write)
            rerouted += moved
            if not loads:
                break
        _tell(rerouted, operator)
        return rerouted

    async def reconcile(self, *, domain: str | None = None, repair: bool = False) -> builtins.list[Reconciliation]:
        """Compare what the database has announced with what the broker holds; with `repair`, ring for what is missing.

        A message that a worker has on loan may not be seen, so what is missing may be on its way; to ring once more
        does no harm. Messages that nothing waits for are dropped by the worker that gets them.
        """
        bus, announcer = self._bus, self._bus._announcer()
        found = []
        for each in await bus._read(self._bus._requests.reconcile(domain)):
            queue, transport = announcer.queue(each), announcer.transport
            depth, bodies = await transport.depth(queue), await transport.peek(queue, limit=MOST_LOOKED_AT)
            announced = await bus._read(store.announced(transport.name, each, older_than=SETTLED, limit=MOST_LOOKED_AT))
            told = Reconciliation(transport.name, each, queue, _commands(announced), depth, looked_into=False)
            if bodies is not None:
                told, missing = await self._compare(told, bodies, announced)
                if repair and missing:
                    loads = await bus._write(Write(store.ring(transport.name, missing), one_statement=True))
                    rung = await announcer.announce(loads, again=True)
                    told = replace(told, rung_again=_commands([(p.lo, p.hi) for p in rung if p.reason is None]))
            found.append(told)
        return found

    async def _compare(
        self, told: Reconciliation, bodies: Sequence[bytes], announced: Sequence[Range]
    ) -> tuple[Reconciliation, Sequence[Range]]:
        key = self._bus.settings.message_key
        messages = list(_read(bodies, None if key is None else key.encode()))
        ranges = sorted({each for ranges in messages for each in ranges})
        seen = await self._bus._read(store.look_up(ranges)) if ranges else []
        whole = len(bodies) < MOST_LOOKED_AT
        return compare(told, len(bodies), messages, dict(zip(ranges, seen, strict=True)), announced if whole else [])


class SyncOutbox:
    """`Outbox` for code without an event loop. It cannot look into a broker, so it compares nothing."""

    def __init__(self, bus: SyncCommandBus) -> None:
        self._bus = bus

    def list(self, *, domain: str | None = None, batch_id: UUID | None = None) -> list[OutboxEntry]:
        """What waits, by transport, domain and why."""
        return self._bus._read(self._bus._requests.outbox(domain, batch_id))

    def retry(self, *, domain: str | None = None, batch_id: UUID | None = None, dry_run: bool = False) -> int:
        """Let relays try again now what waits for another round; returns how many commands that are."""
        if dry_run:
            return _failed(self.list(domain=domain, batch_id=batch_id))
        return self._bus._write(self._bus._requests.retry_outbox(domain, batch_id))

    def reroute(
        self,
        *,
        domain: str | None = None,
        batch_id: UUID | None = None,
        failed_only: bool = True,
        operator: str | None = None,
        dry_run: bool = False,
    ) -> int:
        """Let PostgreSQL deliver what waits after a failed round, or all of it; see `Outbox.reroute`."""
        if dry_run:
            return _reroutable(self.list(domain=domain, batch_id=batch_id), failed_only)
        rerouted = 0
        for write in self._bus._requests.reroute(domain, batch_id, failed_only=failed_only, operator=operator):
            moved, loads = self._bus._write(write)
            rerouted += moved
            if not loads:
                break
        _tell(rerouted, operator)
        return rerouted

    def reconcile(self, *, domain: str | None = None, repair: bool = False) -> builtins.list[Reconciliation]:
        """What the database has announced; only `CommandBus` can look at the broker, and repair."""
        bus, transport = self._bus, self._bus.transport
        if transport is None:
            raise InvalidOperationError("The bus has no transport. Give it one: SyncCommandBus(dsn, transport=URL).")
        if repair:
            raise InvalidOperationError("SyncCommandBus cannot publish. Repair with CommandBus, or at the shell.")
        found = []
        for each in bus._read(bus._requests.reconcile(domain)):
            announced = bus._read(store.announced(transport.name, each, older_than=SETTLED, limit=MOST_LOOKED_AT))
            queue = f"{bus.settings.queue_prefix}.{each}"
            told = Reconciliation(transport.name, each, queue, _commands(announced), None, looked_into=False)
            found.append(told)
        return found


def compare(
    told: Reconciliation,
    bodies: int,
    messages: Sequence[Sequence[Range]],
    seen: dict[Range, Seen],
    announced: Sequence[Range],
) -> tuple[Reconciliation, list[Range]]:
    """What both sides know, and the loads that are announced without a message about any of their commands."""
    waiting = [any(seen[each].waits for each in ranges) for ranges in messages]
    known = [any(seen[each].exists for each in ranges) for ranges in messages]
    rung = {lo >> 10 for ranges in messages for lo, _ in ranges}
    missing = [(lo, hi) for lo, hi in announced if hi >> 10 not in rung]
    answered = sum(exists and not waits for exists, waits in zip(known, waiting, strict=True))
    unknown = bodies - len(messages) + known.count(False)
    return (
        replace(
            told,
            looked_into=True,
            messages=bodies,
            answered=answered,
            unknown=unknown,
            missing=_commands(missing),
        ),
        missing,
    )


def _read(bodies: Sequence[bytes], key: bytes | None) -> Iterator[Sequence[Range]]:
    for body in bodies:
        try:
            yield message.read(body, key).ranges
        except UnreadableMessage:
            continue


def _commands(ranges: Sequence[Range]) -> int:
    return sum(hi - lo + 1 for lo, hi in ranges)


def _failed(entries: Sequence[OutboxEntry]) -> int:
    return sum(entry.commands for entry in entries if entry.rounds)


def _reroutable(entries: Sequence[OutboxEntry], failed_only: bool) -> int:
    return _failed(entries) if failed_only else sum(entry.commands for entry in entries)


def _tell(rerouted: int, operator: str | None) -> None:
    if rerouted:
        log.info("Rerouted %d commands to PostgreSQL%s", rerouted, f", by {operator}" if operator else "")
