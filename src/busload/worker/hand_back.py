"""Hands commands and leases back to the queue, without burning an attempt."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from uuid import UUID

import psycopg

from busload.commands import claim, rescue
from busload.commands.execution import Lease, Leased
from busload.commands.payload import encode
from busload.commands.wording import counted
from busload.sync.connection import connect
from busload.sync.plan import perform
from busload.worker.shared import Shared

log = logging.getLogger("busload")


class HandBack:
    """Commands that leave the worker without having run.

    If the answer of the database is lost, the commands stay in `leaving`, and the next call of `once` hands them back
    again.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._leaving: list[Leased] = []
        self._unknown: set[tuple[str, str]] = set()
        self.commands = 0
        """How many were handed back so far."""

    @property
    def leaving(self) -> Counter[UUID]:
        """How many commands of each lease are on their way back."""
        return Counter(one.lease.lease_id for one in self._leaving)

    def add(self, leased: Iterable[Leased]) -> None:
        """Hand these back with the next call of `once`."""
        leaving = list(leased)
        self._leaving += leaving
        self._shared.permits.give_up(leaving)

    async def once(self) -> None:
        """Hand back what was added. Meanwhile others may be added."""
        if not self._leaving:
            return
        leaving = list(self._leaving)
        parts = _by_lease(one for one in leaving if not one.settled)
        whole = {lease: parts.pop(lease) for lease in list(parts) if len(parts[lease]) == lease.unsettled}
        if whole:
            await self._shared.in_transaction(rescue.release([lease.lease_id for lease in whole]))
            self._forget(whole)
        if parts:
            await self._give_back(parts, None, ())
        gone = set(map(id, leaving))
        self._leaving = [one for one in self._leaving if id(one) not in gone]

    async def without_unknown(self, leased: list[Leased]) -> list[Leased]:
        """Give back commands that have no handler here; they wait for a worker that has one. Returns the others."""
        find = self._shared.bus.handlers.find
        kinds = {(one.lease.domain, one.command_type) for one in leased}
        strange = {kind for kind in kinds if find(*kind) is None}
        if not strange:
            return leased
        for domain, command_type in strange - self._unknown:
            log.warning(
                "No handler for %s in %s here; such commands wait for a worker that has one", command_type, domain
            )
        self._unknown |= strange
        unknown = [one for one in leased if (one.lease.domain, one.command_type) in strange]
        await self._postpone_unknown(unknown, self._shared.settings.no_handler_pause.total_seconds())
        return [one for one in leased if (one.lease.domain, one.command_type) not in strange]

    async def _postpone_unknown(self, leased: list[Leased], seconds: float) -> None:
        parts = _by_lease(leased)
        types = ({one.command_type for one in commands} for commands in parts.values())
        await self._give_back(parts, seconds, [encode({"command_types": sorted(each)}) for each in types])

    async def release(self, lease_ids: Sequence[UUID]) -> None:
        """Hand back leases whose commands do not run here: the answer to a claim was lost, or the worker stops."""
        returned = await self._shared.in_transaction(rescue.release(list(lease_ids)))
        self._shared.held.drop(lease_ids)
        self.commands += returned.commands
        if returned.commands:
            log.info("Handed back %s", counted(returned.commands, "command"))

    async def _give_back(self, parts: dict[Lease, list[Leased]], pause: float | None, details: Sequence[str]) -> None:
        ids = {lease: [one.id for one in commands] for lease, commands in parts.items()}
        await self._shared.perform(claim.give_back(ids, pause=pause, details=details))
        self._forget(parts)

    def _forget(self, parts: dict[Lease, list[Leased]]) -> None:
        for lease, commands in parts.items():
            lease.running -= len(commands)
            self.commands += len(commands)
            self._shared.held.settled(commands)


def _by_lease(leased: Iterable[Leased]) -> dict[Lease, list[Leased]]:
    by_lease: dict[Lease, list[Leased]] = defaultdict(list)
    for one in leased:
        by_lease[one.lease].append(one)
    return by_lease


def hand_back_in_thread(shared: Shared) -> None:
    """Hand everything back, and retire, from another thread: the event loop is blocked, and the process is to end."""
    try:
        with connect(shared.bus.dsn, response_timeout=shared.settings.deadline.total_seconds()) as conn:
            with conn.transaction():
                perform(conn, rescue.release(shared.held.lease_ids))
            perform(conn, rescue.retire(worker=shared.number))
    except psycopg.Error as error:
        log.warning("Could not hand back the remaining commands; others take them when the lease ends: %r", error)
